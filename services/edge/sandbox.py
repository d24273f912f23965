"""One sandbox as its edge knows it: what it was asked to be, how it stands, what it holds.

Only the event loop touches it. Its status changes through `update` alone, which writes the journal
first; pause, resume and policy changes exclude one another by `transition`, its end waits for none.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from libdsec.errors import SandboxDead
from libdsec.wire.sandbox import Qos, SandboxInfo, State

from ..chassis.clock import Clock
from .clocks import Clocks
from .command import CommandLog
from .holding import Holding
from .record import Origin, Records, Status


@dataclass(eq=False)
class Sandbox:
    """made at acceptance or adoption -> ready -> (paused, ready)* -> gone."""

    origin: Origin
    status: Status
    holding: Holding
    clocks: Clocks
    journaled: bool = False  # from the moment its process runs
    oom_kills_told: int = 0  # as the kill of some command, so not to be blamed for a later death
    transition: asyncio.Lock = field(default_factory=asyncio.Lock)
    commands: CommandLog = field(default_factory=CommandLog)
    gone: asyncio.Future[SandboxDead] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    starting: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        return self.origin.sandbox_id

    @property
    def lane(self) -> str:
        return self.origin.spec.qos.lane

    @property
    def paused(self) -> bool:
        return self.status.state is State.PAUSED

    @property
    def usable(self) -> bool:
        """Ready or paused, and not on its way out."""
        return self.status.state in {State.READY, State.PAUSED} and self.status.ending is None

    @property
    def committed_ls_cpus(self) -> float:
        spec = self.origin.spec
        return spec.resources.cpus if spec.qos is Qos.LATENCY_SENSITIVE else 0.0

    def update(self, records: Records, **changes: object) -> None:
        """Change the status, in the journal first once the sandbox is in it."""
        status = self.status.model_copy(update=changes)
        if self.journaled:
            records.save_status(self.id, status)
        self.status = status

    def info(self, node: str, clock: Clock) -> SandboxInfo:
        """What a caller may know. Secrets are not in it."""
        now, wall = clock.monotonic_s(), clock.wall_s()
        spec, status, clocks = self.origin.spec, self.status, self.clocks
        return SandboxInfo(
            sandbox_id=self.id,
            node=node,
            backend=spec.backend,
            state=status.state,
            labels=spec.labels,
            image=spec.image,
            generation=status.generation,
            epoch=status.epoch,
            created_at=self.origin.created_at,
            idle_expires_at=None if self.paused else wall + clocks.idle.remaining_s(now),
            expires_at=wall + clocks.life.remaining_s(now),
            paused_expires_at=wall + clocks.paused.remaining_s(now) if self.paused else None,
            phase=status.phase,
            request_id=self.origin.request_id,
            phases_ms=status.phases_ms,
        )
