"""The verbs on one sandbox that are not commands or files: decode, call, reply."""

from __future__ import annotations

from libdsec.bus import Call
from libdsec.errors import DeathReason, InvalidArgument, SandboxDead
from libdsec.wire.sandbox import (
    AuditLog,
    Backend,
    ById,
    ExtendSandbox,
    PauseResult,
    PauseSandbox,
    PolicyApplied,
    ResumeResult,
    SandboxInfo,
    SandboxMetrics,
    SetNetwork,
    SetPhase,
    State,
    StopSandbox,
)

from .lifecycle import Lifecycle
from .node import Node
from .pause import Pauses
from .policing import Policing
from .sandbox import Sandbox
from .table import Table
from .usage import read_usage


class SandboxVerbs:
    """One method per subject."""

    def __init__(
        self,
        node: Node,
        table: Table,
        lifecycle: Lifecycle,
        pauses: Pauses,
        policing: Policing,
    ) -> None:
        self._node = node
        self._table = table
        self._lifecycle = lifecycle
        self._pauses = pauses
        self._policing = policing

    async def info(self, request: ById, call: Call) -> SandboxInfo:
        return self._info(self._table.find_any(call.project, request.sandbox_id))

    async def metrics(self, request: ById, call: Call) -> SandboxMetrics:
        sandbox = self._table.find(call.project, request.sandbox_id)
        return await self._node.run(read_usage, self._node.host.disk, sandbox)

    async def pause(self, request: PauseSandbox, call: Call) -> PauseResult:
        sandbox = self._table.find(call.project, request.sandbox_id)
        return await self._pauses.pause(sandbox, reclaim=request.reclaim)

    async def resume(self, request: ById, call: Call) -> ResumeResult:
        return await self._pauses.resume(self._table.find(call.project, request.sandbox_id))

    async def extend(self, request: ExtendSandbox, call: Call) -> SandboxInfo:
        """New limits, counted from the same beginnings; idle time begins anew."""
        sandbox = self._table.find(call.project, request.sandbox_id)
        changes = request.model_dump(exclude={"sandbox_id"}, exclude_none=True)
        if any(value <= 0 for value in changes.values()):
            raise InvalidArgument("a timeout is more than 0 seconds")
        lifetime = sandbox.status.lifetime.model_copy(update=changes)
        sandbox.update(self._node.records, lifetime=lifetime)
        sandbox.clocks.set_limits(lifetime)
        sandbox.clocks.idle.reset(self._node.clock.monotonic_s())
        self._lifecycle.arm(sandbox)
        return self._info(sandbox)

    async def set_network(self, request: SetNetwork, call: Call) -> PolicyApplied:
        sandbox = self._table.find(call.project, request.sandbox_id)
        return await self._policing.set_network(sandbox, request.network)

    async def set_phase(self, request: SetPhase, call: Call) -> PolicyApplied:
        sandbox = self._table.find(call.project, request.sandbox_id)
        return await self._policing.set_phase(sandbox, request.name)

    async def audit(self, request: ById, call: Call) -> AuditLog:
        return await self._policing.audit(self._table.find(call.project, request.sandbox_id))

    async def stop(self, request: StopSandbox, call: Call) -> SandboxInfo:
        """Idempotent: one that is gone already is answered with how it went."""
        try:
            sandbox = self._table.find_any(call.project, request.sandbox_id)
        except SandboxDead as err:
            return self._gone(request.sandbox_id, err.reason)
        death = await self._lifecycle.end(sandbox, DeathReason.STOPPED)
        info = self._info(sandbox)
        return info.model_copy(update={"state": State.DEAD, "death": death.reason.value})

    def _info(self, sandbox: Sandbox) -> SandboxInfo:
        return sandbox.info(self._node.name, self._node.clock)

    def _gone(self, sandbox_id: str, reason: DeathReason) -> SandboxInfo:
        dead = self._table.dead(sandbox_id)
        return SandboxInfo(
            sandbox_id=sandbox_id,
            node=self._node.name,
            backend=Backend.CONTAINER,
            state=State.DEAD,
            request_id=dead.request_id if dead is not None else "",
            death=reason.value,
        )
