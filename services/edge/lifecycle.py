"""A sandbox's way from its acceptance to its end, however it ends.

One task per sandbox ends it, whoever asks first: a stop, an expiry, its process's exit, a cancelled
request. What is decided is journaled before it is done, so that a crash in between changes neither
the reason nor the outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from libdsec.errors import DeathReason, DSecError, Internal, NoCapacity, SandboxDead
from libdsec.wire.layer import ResolvedLayers
from libdsec.wire.sandbox import State
from libhost.pidfd import ExitStatus, exit_status, identify

from .clocks import Clocks
from .death import Evidence, judge
from .fault import Point
from .holding import Holding
from .journal import JournalFullError
from .node import Node
from .record import Dead, Origin, Process, Status
from .sandbox import Sandbox
from .start import active_policy, plan_start, start
from .table import Table, death_of
from .tasks import Tasks
from .timing import Phases

_log = structlog.get_logger("edge.lifecycle")

_CHECK_SLACK_S: Final = 0.05

Observer = Callable[[Sandbox, State, str], None]


class Lifecycle:
    """create, adopt -> end. `observe` is told of every change of state."""

    def __init__(self, node: Node, table: Table, tasks: Tasks, observe: Observer) -> None:
        self._node = node
        self._table = table
        self._tasks = tasks
        self._observe = observe

    def accept(self, origin: Origin) -> Sandbox:
        """Enter it into the table; nothing is touched yet."""
        spec = origin.spec
        now = self._node.clock.monotonic_s()
        sandbox = Sandbox(
            origin,
            Status(policy=active_policy(spec), phase=spec.phase, lifetime=spec.lifetime),
            Holding(self._node, self._node.host.paths.sandbox(origin.sandbox_id)),
            Clocks(spec.lifetime, now),
        )
        self._table.add(sandbox)
        self._observe(sandbox, State.ACCEPTED, "")
        return sandbox

    async def create(self, sandbox: Sandbox, resolved: ResolvedLayers, phases: Phases) -> None:
        """Start what was accepted; returns when it is ready, durably.

        Raises:
            DSecError: it could not be started, and nothing of it is left.
        """
        sandbox.starting = asyncio.current_task()
        try:
            with phases.phase("waiting"):
                await self._node.starts.acquire()
            try:
                await self._start(sandbox, resolved, phases)
            finally:
                self._node.starts.release()
        except BaseException:
            self._table.drop(sandbox.id)
            raise
        finally:
            sandbox.starting = None
        self._observe(sandbox, State.READY, "")
        self.watch(sandbox)

    def watch(self, sandbox: Sandbox) -> None:
        """From now on its exit and its limits are noticed."""
        if sandbox.holding.exit is not None:
            sandbox.holding.exit.then(
                lambda: self._tasks.spawn(self._exited(sandbox), name=f"exit {sandbox.id}")
            )
        self.arm(sandbox)

    def arm(self, sandbox: Sandbox) -> None:
        """(Re-)arm the one timer that looks at the limits; needed when a limit was lowered."""
        if sandbox.expiry is not None:
            sandbox.expiry.cancel()
        wait_s = sandbox.clocks.next_check_s(self._node.clock.monotonic_s()) + _CHECK_SLACK_S
        loop = asyncio.get_running_loop()
        sandbox.expiry = loop.call_later(wait_s, self._check_limits, sandbox)

    async def end(self, sandbox: Sandbox, reason: DeathReason, detail: str = "") -> SandboxDead:
        """End it, whatever it is doing; idempotent, the first reason stands."""
        if sandbox.starting is not None:
            sandbox.starting.cancel()
            await asyncio.wait({sandbox.starting})
        if sandbox.ending is None and not sandbox.gone.done():
            if not sandbox.journaled:
                return SandboxDead(f"sandbox {sandbox.id} never started", reason=reason)
            sandbox.update(self._node.records, ending=reason)
            sandbox.ending = self._tasks.spawn(
                self._end(sandbox, reason, detail), name=f"end {sandbox.id}"
            )
        return await asyncio.shield(sandbox.gone)

    async def _start(self, sandbox: Sandbox, resolved: ResolvedLayers, phases: Phases) -> None:
        node = self._node
        plan = plan_start(
            sandbox.holding.sandbox, sandbox.origin.spec, nameservers=node.options.nameservers
        )
        started = await start(node, sandbox.holding, plan, resolved, phases)
        now = node.clock.monotonic_s()
        sandbox.clocks = Clocks(sandbox.status.lifetime, now)
        status = sandbox.status.model_copy(
            update={
                "state": State.READY,
                "process": self._identity(sandbox),
                "generation": started.in_force.generation,
                "policy_env": started.in_force.env,
                "hosts": started.in_force.hosts,
                "since_mono": now,
                "phases_ms": phases.ms,
            }
        )
        try:
            node.records.save(sandbox.origin, status)
        except BaseException:
            await sandbox.holding.release()  # what is not in the journal must not live
            raise
        sandbox.status, sandbox.journaled = status, True

    def _identity(self, sandbox: Sandbox) -> Process:
        process = sandbox.holding.process
        if process is None:
            raise Internal("a started sandbox has no process")
        found = identify(process.pid)
        return Process(pid=found.pid, start_ticks=found.start_ticks, boot_id=self._node.boot_id)

    def _check_limits(self, sandbox: Sandbox) -> None:
        if not sandbox.usable:
            return
        limit = sandbox.clocks.expired(self._node.clock.monotonic_s())
        if limit is None:
            self.arm(sandbox)
            return
        self._tasks.spawn(
            self.end(sandbox, DeathReason.EXPIRED, limit.value), name=f"expire {sandbox.id}"
        )

    async def _exited(self, sandbox: Sandbox) -> None:
        """PID 1 has ended: if nobody here has decided that, find out why."""
        if sandbox.ending is None and not sandbox.gone.done():
            reason, detail = await self._node.run(self._judge, sandbox)
            await self.end(sandbox, reason, detail)

    def _judge(self, sandbox: Sandbox) -> tuple[DeathReason, str]:
        holding = sandbox.holding
        ended = ExitStatus(None, None)
        if holding.process is not None:
            ended = exit_status(holding.process.pidfd)
        oom_kills = holding.cgroup.stats().memory.oom_kills if holding.cgroup is not None else 0
        return judge(Evidence(sandbox.status.ending, ended, oom_kills, sandbox.oom_kills_told))

    async def _end(self, sandbox: Sandbox, reason: DeathReason, detail: str) -> None:
        if sandbox.expiry is not None:
            sandbox.expiry.cancel()
        self._node.fault(Point.DURING_STOP)
        left_over = await sandbox.holding.release()
        origin = sandbox.origin
        dead = Dead(
            sandbox_id=sandbox.id,
            project=origin.project,
            request_id=origin.request_id,
            reason=reason,
            at=self._node.clock.wall_s(),
            detail=detail,
        )
        self._table.bury(dead)
        if left_over:
            _log.warning("sandbox ended, something is left", sandbox=sandbox.id, left=left_over)
        self._observe(sandbox, State.DEAD, reason.value)
        sandbox.gone.set_result(death_of(dead))


def as_refusal(err: BaseException) -> DSecError:
    """Any failure of a start as what its caller is told."""
    if isinstance(err, JournalFullError):
        return NoCapacity("the node's journal has no room", retry_after_s=30.0)
    return err if isinstance(err, DSecError) else Internal("the start failed unexpectedly")
