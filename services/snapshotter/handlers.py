"""The snapshotter's verbs: budgets in, numbers and typed errors out."""

from __future__ import annotations

from libdsec.bus import Call
from libdsec.errors import Conflict, DeadlineExceeded, InvalidArgument, NotFound
from libdsec.wire.ids import sandbox_node
from libdsec.wire.snapshot import FreezeRequest, Frozen, Thawed, ThawRequest
from libhost.aio import HostThreads

from .metrics import PauseMetrics
from .pause import NotFrozenError, Pauser

_MARGIN_S = 0.5  # of the budget, for the way back and for the thaw after a prefetch
_LONGEST_S = 600.0


class Pauses:
    """One worker's handlers; several share a node's subjects by queue group.

    Freezing and thawing have threads of their own: a resume never queues behind a long reclaim.
    """

    def __init__(self, node: str, pauser: Pauser, parallel: int, metrics: PauseMetrics) -> None:
        self._node = node
        self._pauser = pauser
        self._freezing = HostThreads(parallel)
        self._thawing = HostThreads(parallel)
        self._metrics = metrics

    def close(self) -> None:
        self._freezing.close()
        self._thawing.close()

    async def freeze(self, request: FreezeRequest, call: Call) -> Frozen:
        """
        Raises:
            NotFound: the sandbox has no cgroup here.
            Conflict: it could not be frozen in time, and runs again; the message names the task.
        """
        self._check(request.sandbox_id)
        deadline_s = _bounded(min(request.deadline_s, call.budget.remaining_s - _MARGIN_S))
        try:
            frozen = await self._freezing.run(
                deadline_s + _MARGIN_S,
                lambda: self._pauser.freeze(
                    request.sandbox_id, reclaim_memory=request.reclaim, deadline_s=deadline_s
                ),
            )
        except FileNotFoundError as err:
            self._metrics.refused("not_found")
            raise self._unknown(request.sandbox_id) from err
        except NotFrozenError as err:
            self._metrics.refused("not_frozen")
            raise Conflict(
                f"sandbox {request.sandbox_id} did not freeze within {deadline_s:.1f} s and runs "
                f"on: {err}",
                hint="pause it again when that has ended",
            ) from err
        except TimeoutError as err:
            self._metrics.refused("timeout")
            raise _overdue(request.sandbox_id) from err
        self._metrics.froze(frozen)
        return frozen

    async def thaw(self, request: ThawRequest, call: Call) -> Thawed:
        """Raises NotFound."""
        self._check(request.sandbox_id)
        timeout_s = _bounded(call.budget.remaining_s - _MARGIN_S)
        try:
            thawed = await self._thawing.run(
                timeout_s + _MARGIN_S,
                lambda: self._pauser.thaw(
                    request.sandbox_id, prefetch_memory=request.prefetch, timeout_s=timeout_s
                ),
            )
        except FileNotFoundError as err:
            raise self._unknown(request.sandbox_id) from err
        except TimeoutError as err:
            raise _overdue(request.sandbox_id) from err
        self._metrics.thawed(thawed)
        return thawed

    def _check(self, sandbox_id: str) -> None:
        """The id becomes a path in every hierarchy: only this node's, only of the grammar."""
        if sandbox_node(sandbox_id) != self._node:
            raise InvalidArgument(f"sandbox {sandbox_id} does not belong to node {self._node}")

    def _unknown(self, sandbox_id: str) -> NotFound:
        return NotFound(f"sandbox {sandbox_id} has no cgroup on {self._node}: it has ended")


def _overdue(sandbox_id: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the kernel did not answer in time about sandbox {sandbox_id}",
        hint="it is frozen or running; thawing it is always possible",
    )


def _bounded(timeout_s: float) -> float:
    if timeout_s <= 0:
        raise DeadlineExceeded("no time is left for the pause")
    return min(timeout_s, _LONGEST_S)
