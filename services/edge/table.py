"""The node's sandboxes by id: those that live, and for a while those that died.

The project comes from the subject, which the bus guards, and is checked here and nowhere else:
another project's id is unknown, not forbidden, so that ids cannot be probed for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from libdsec.errors import DeathReason, DSecError, NotFound, SandboxDead, Unavailable
from libdsec.wire.ids import sandbox_incarnation, sandbox_node

from ..chassis.clock import Clock
from .record import Dead, Records
from .sandbox import Sandbox

DEAD_RETENTION_S = 3600.0
DEAD_LIMIT = 10_000  # the oldest are forgotten first


class Table:
    """Not thread-safe; every call happens on the event loop."""

    def __init__(self, node: str, incarnation: str, records: Records, clock: Clock) -> None:
        self._node = node
        self._incarnation = incarnation
        self._records = records
        self._clock = clock
        self._alive: dict[str, Sandbox] = {}
        self._dead: dict[str, Dead] = {}  # in the order of their deaths

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(tuple(self._alive.values()))

    def __len__(self) -> int:
        return len(self._alive)

    def add(self, sandbox: Sandbox) -> None:
        self._alive[sandbox.id] = sandbox

    def drop(self, sandbox_id: str) -> None:
        """It never came to life."""
        self._alive.pop(sandbox_id, None)

    def bury(self, dead: Dead) -> None:
        self._records.bury(dead)
        self._alive.pop(dead.sandbox_id, None)
        self._dead[dead.sandbox_id] = dead
        self.forget_old()

    def recall(self, dead: Iterable[Dead]) -> None:
        """What a predecessor buried."""
        for one in sorted(dead, key=lambda d: d.at):
            self._dead[one.sandbox_id] = one
        self.forget_old()

    def forget_old(self) -> None:
        horizon = self._clock.wall_s() - DEAD_RETENTION_S
        while self._dead:
            oldest = next(iter(self._dead.values()))
            if oldest.at > horizon and len(self._dead) <= DEAD_LIMIT:
                return
            del self._dead[oldest.sandbox_id]
            self._records.forget(oldest.sandbox_id)

    def get(self, sandbox_id: str) -> Sandbox | None:
        """Of any project; for the edge's own use."""
        return self._alive.get(sandbox_id)

    def dead(self, sandbox_id: str) -> Dead | None:
        return self._dead.get(sandbox_id)

    def find(self, project: str, sandbox_id: str) -> Sandbox:
        """A project's sandbox that can be used.

        Raises:
            NotFound: never heard of, or another project's.
            SandboxDead: it is gone; the reason is in it.
            Unavailable: it is still starting.
        """
        sandbox = self._find(project, sandbox_id)
        if sandbox.usable:
            return sandbox
        if sandbox.status.ending is not None:
            raise SandboxDead(f"sandbox {sandbox_id} is ending", reason=sandbox.status.ending)
        raise Unavailable(f"sandbox {sandbox_id} is still starting", retry_after_s=0.2)

    def find_any(self, project: str, sandbox_id: str) -> Sandbox:
        """As `find`, also one that starts or ends."""
        return self._find(project, sandbox_id)

    def select(self, project: str | None, labels: Mapping[str, str]) -> list[Sandbox]:
        """Sandboxes of a project (None: of all) whose labels contain all of these."""
        return [
            s
            for s in self._alive.values()
            if (project is None or s.origin.project == project)
            and labels.items() <= s.origin.spec.labels.items()
        ]

    def _find(self, project: str, sandbox_id: str) -> Sandbox:
        sandbox = self._alive.get(sandbox_id)
        if sandbox is not None and sandbox.origin.project == project:
            return sandbox
        raise self._absent(project, sandbox_id)

    def _absent(self, project: str, sandbox_id: str) -> DSecError:
        dead = self._dead.get(sandbox_id)
        if dead is not None and dead.project == project:
            return death_of(dead)
        unknown = NotFound(
            f"no sandbox {sandbox_id} in project {project!r}",
            hint=f"what has ended is remembered for {DEAD_RETENTION_S / 3600:g} h",
        )
        if sandbox_node(sandbox_id) != self._node or sandbox_id in self._alive:
            return unknown
        if sandbox_incarnation(sandbox_id) != self._incarnation:
            return SandboxDead(
                f"sandbox {sandbox_id} was lost with an earlier life of node {self._node}",
                reason=DeathReason.NODE_LOST,
            )
        return unknown


def death_of(dead: Dead) -> SandboxDead:
    why = f": {dead.detail}" if dead.detail else ""
    return SandboxDead(
        f"sandbox {dead.sandbox_id} is gone ({dead.reason.value}{why})", reason=dead.reason
    )
