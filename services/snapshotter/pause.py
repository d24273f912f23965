"""The steps of pause and resume, as blocking calls on one sandbox's cgroup."""

from __future__ import annotations

import time
from dataclasses import dataclass

from libdsec.wire.snapshot import Frozen, Thawed
from libhost.cgroup import NodeCgroups, SandboxCgroup
from libhost.errors import UnsupportedError
from libhost.memory import ReclaimWay, prefetch, reclaim
from libhost.probe import HostCapabilities
from libhost.task import blocked_tasks

_NAMED_TASKS = 3


class NotFrozenError(Exception):
    """Some task came to no stop in time; the sandbox runs again."""


@dataclass(frozen=True)
class Pauser:
    """Freezes and thaws the sandboxes of one node. Each step says what is to be: repeat at will."""

    cgroups: NodeCgroups
    host: HostCapabilities

    def freeze(self, sandbox_id: str, *, reclaim_memory: bool, deadline_s: float) -> Frozen:
        """
        Raises:
            FileNotFoundError: no such sandbox on this node.
            NotFrozenError: names the tasks that did not stop.
        """
        cgroup = self.cgroups.open(sandbox_id)
        began = time.monotonic()
        try:
            cgroup.freeze(timeout_s=deadline_s)
        except TimeoutError as err:
            reason = _who_does_not_stop(cgroup)
            cgroup.thaw()
            raise NotFrozenError(reason) from err
        froze = time.monotonic()
        frozen = Frozen(frozen_ms=(froze - began) * 1000, how="none: not asked for")
        if reclaim_memory:
            frozen = self._reclaim(cgroup, frozen, deadline_s - (froze - began))
        return frozen.model_copy(update={"resident_bytes": cgroup.stats().memory.current_bytes})

    def _reclaim(self, cgroup: SandboxCgroup, frozen: Frozen, timeout_s: float) -> Frozen:
        """What could not be taken back is said, and is no failure: the sandbox is paused."""
        began = time.monotonic()
        try:
            done = reclaim(cgroup, self.host, timeout_s=timeout_s)
        except (UnsupportedError, OSError) as err:
            return frozen.model_copy(update={"how": f"none: {err}"})
        way = done.way
        if way is ReclaimWay.FILE_ONLY and done.swapped_bytes > 0:
            way = ReclaimWay.PAGEOUT  # swap was added after this process looked for it
        return frozen.model_copy(
            update={
                "reclaim_ms": (time.monotonic() - began) * 1000,
                "reclaimed_bytes": done.anon_bytes + done.file_bytes,
                "anon_bytes": done.anon_bytes,
                "file_bytes": done.file_bytes,
                "swapped_bytes": done.swapped_bytes,
                "partial": done.partial,
                "how": way.value,
            }
        )

    def thaw(self, sandbox_id: str, *, prefetch_memory: bool, timeout_s: float) -> Thawed:
        """Thaws whatever becomes of the prefetch. Raises FileNotFoundError."""
        cgroup = self.cgroups.open(sandbox_id)
        began = time.monotonic()
        advised = 0
        try:
            if prefetch_memory and cgroup.is_frozen():
                advised = prefetch(cgroup, timeout_s=timeout_s)
        except (UnsupportedError, OSError):
            pass  # TimeoutError too: the pages come in as they are touched, only later
        finally:
            fetched = time.monotonic()
            cgroup.thaw()
        return Thawed(
            prefetch_ms=(fetched - began) * 1000,
            prefetched_bytes=advised,
            thaw_ms=(time.monotonic() - fetched) * 1000,
        )


def _who_does_not_stop(cgroup: SandboxCgroup) -> str:
    blocked = blocked_tasks(cgroup.process_ids())
    if not blocked:
        return "it has tasks that did not come to a stop"
    more = len(blocked) - _NAMED_TASKS
    named = "; ".join(task.describe() for task in blocked[:_NAMED_TASKS])
    return f"{named}; and {more} more" if more > 0 else named
