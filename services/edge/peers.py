"""The two services of the same node that an edge talks to, and whether they are there.

Each says every second that it is well; what has not been heard for SILENT_AFTER_S is away. The
policy service is a condition for every create (no policy, no process); the snapshotter only makes
pause and resume better, so its absence is an ordinary answer here, not an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from libdsec.bus import Bus, Call
from libdsec.errors import DeadlineExceeded, DSecError, Unavailable
from libdsec.wire import subjects
from libdsec.wire.policy import (
    ApplyPolicy,
    AuditPolicy,
    CheckPolicy,
    PolicyAudit,
    PolicyHealth,
    PolicyInForce,
    Reconciled,
    ReconcilePolicy,
    RemovePolicy,
)
from libdsec.wire.sandbox import PolicySpec
from libdsec.wire.snapshot import FreezeRequest, Frozen, SnapshotterHealth, Thawed, ThawRequest

SILENT_AFTER_S: Final = 3.0
_APPLY_BUDGET_S: Final = 5.0
_THAW_BUDGET_S: Final = 2.0


class Freshness:
    """When somebody was last heard, and what it said then."""

    def __init__(self, who: str, monotonic: Callable[[], float]) -> None:
        self._who = who
        self._monotonic = monotonic
        self._heard_at: float | None = None
        self._ready = False
        self._reason = ""

    def heard(self, ready: bool, reason: str) -> None:
        self._heard_at, self._ready, self._reason = self._monotonic(), ready, reason

    def asked_in_vain(self) -> None:
        """It did not answer: whatever it said before, it is not ready until it is heard again."""
        self._ready, self._reason = False, f"{self._who} does not answer"

    @property
    def ready(self) -> bool:
        return self._ready and not self._silent

    @property
    def reason(self) -> str:
        """Why it is not ready; "" when it is."""
        if self._heard_at is None:
            return f"{self._who} has not been heard of yet"
        if self._silent:
            return f"{self._who} has been silent for {self._monotonic() - self._heard_at:.0f} s"
        return "" if self._ready else self._reason

    @property
    def _silent(self) -> bool:
        return self._heard_at is None or self._monotonic() - self._heard_at > SILENT_AFTER_S


class PolicyPeer:
    """The node's policy service."""

    def __init__(self, bus: Bus, node: str, monotonic: Callable[[], float]) -> None:
        self._bus = bus
        self._node = node
        self.health = Freshness("the policy service", monotonic)
        self.mechanisms: tuple[str, ...] = ()

    async def on_health(self, health: PolicyHealth, _call: Call) -> None:
        self.health.heard(health.ready, health.reason)
        self.mechanisms = health.mechanisms

    async def apply(self, apply: ApplyPolicy) -> PolicyInForce:
        """Raises DSecError: then nothing may be assumed to be in force. After an Unavailable the
        node takes no sandboxes until the policy service is heard again."""
        try:
            reply = await self._bus.request(
                subjects.POLICY_APPLY, apply, node=self._node, budget_s=_APPLY_BUDGET_S
            )
        except (Unavailable, DeadlineExceeded) as err:
            self.health.asked_in_vain()  # it may have been killed with the request in its hands
            raise Unavailable(
                f"the policy service of {self._node} does not answer: {err.message}",
                hint="the request is worth repeating",
            ) from err
        if reply.generation != apply.generation:
            raise Unavailable(
                f"the policy service put generation {reply.generation} in force, "
                f"not {apply.generation}",
                hint="the request is worth repeating",
            )
        return reply

    async def check(self, policy: PolicySpec) -> None:
        """Raises DSecError if this policy could not be put in force here."""
        await self._bus.request(
            subjects.POLICY_CHECK,
            CheckPolicy(policy=policy),
            node=self._node,
            budget_s=_APPLY_BUDGET_S,
        )

    async def remove(self, sandbox_id: str) -> None:
        await self._bus.request(
            subjects.POLICY_REMOVE,
            RemovePolicy(sandbox_id=sandbox_id),
            node=self._node,
            budget_s=_APPLY_BUDGET_S,
        )

    async def audit(self, sandbox_id: str) -> PolicyAudit:
        return await self._bus.request(
            subjects.POLICY_AUDIT,
            AuditPolicy(sandbox_id=sandbox_id),
            node=self._node,
            budget_s=_APPLY_BUDGET_S,
        )

    async def reconcile(self, sandbox_ids: tuple[str, ...]) -> Reconciled:
        """Removes the policies of sandboxes that are not listed; names those that have none."""
        return await self._bus.request(
            subjects.POLICY_RECONCILE,
            ReconcilePolicy(sandbox_ids=sandbox_ids),
            node=self._node,
            budget_s=_APPLY_BUDGET_S,
        )


class SnapshotterPeer:
    """The node's snapshotter; None as an answer means that the edge has to do it plainly."""

    def __init__(self, bus: Bus, node: str, monotonic: Callable[[], float]) -> None:
        self._bus = bus
        self._node = node
        self.health = Freshness("the snapshotter", monotonic)

    async def on_health(self, health: SnapshotterHealth, _call: Call) -> None:
        self.health.heard(health.ready, health.reason)

    async def freeze(self, request: FreezeRequest) -> Frozen | None:
        if not self.health.ready:
            return None
        try:
            return await self._bus.request(
                subjects.SNAPSHOT_FREEZE,
                request,
                node=self._node,
                budget_s=request.deadline_s + 1.0,
            )
        except (Unavailable, DeadlineExceeded):
            return None

    async def thaw(self, request: ThawRequest) -> Thawed | None:
        if not self.health.ready:
            return None
        try:
            return await self._bus.request(
                subjects.SNAPSHOT_THAW, request, node=self._node, budget_s=_THAW_BUDGET_S
            )
        except DSecError:  # whatever it is: a resume never depends on the snapshotter
            return None
