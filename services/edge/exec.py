"""Commands: from a caller's request to the agent, and its output and end back to the caller.

A command belongs to its sandbox, not to the call that began it: a caller that goes away, a budget
that ends and a broken channel all leave it running, and the same exec_id finds it again. Its own
timeout is the agent's. While it runs the sandbox is not idle, whether anybody reads it or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from libdsec.bus import Call
from libdsec.errors import SandboxDead, Unavailable
from libdsec.wire import defaults as d
from libdsec.wire.execution import (
    KIND_STARTED,
    AttachExec,
    ExecCredit,
    ExecDone,
    ExecRequest,
    ExecStarted,
)

from .agent import AgentChannel, AgentGoneError, AgentProcess, AgentRefusedError, AgentResult
from .agent_errors import refusal, translated
from .command import Command, Window
from .exec_result import exec_done
from .exec_spec import check_exec_id, exec_spec
from .fault import Point
from .node import Node
from .pause import Pauses
from .relay import Progress, Relay
from .sandbox import Sandbox
from .table import Table
from .tasks import Tasks
from .timing import record_span

Opening = Callable[[AgentChannel], Awaitable[AgentProcess]]

_DEATH_GRACE_S: Final = 5.0
_RECONNECT_S: Final = 0.5


class Execs:
    """exec, attach, credit; and watching over commands that nobody reads."""

    def __init__(self, node: Node, table: Table, pauses: Pauses, tasks: Tasks) -> None:
        self._node = node
        self._table = table
        self._pauses = pauses
        self._tasks = tasks
        self._reading: set[asyncio.Task[object]] = set()

    def let_go(self) -> None:
        """End every call that reads a command; its caller is told to ask again."""
        for task in self._reading:
            task.cancel()

    async def exec(self, request: ExecRequest, call: Call) -> ExecDone | None:
        sandbox = self._table.find(call.project, request.sandbox_id)
        spec = exec_spec(sandbox.origin, sandbox.status, request)
        command = sandbox.commands.note(request.exec_id, tuple(map(str, spec.argv)))
        command.who_where = f"as {spec.user or 'root'!r} in {str(spec.cwd)!r}"
        async with self._pauses.active(sandbox):
            process = await self._open(sandbox, command, lambda channel: channel.start(spec))
            feeding = self._feed(command, process, request)
            if request.detach and feeding is not None:
                # Told of the start, the caller attaches, and what is not written by then is lost.
                await feeding
            if request.stream or request.detach or request.stdin_open:
                await call.send(KIND_STARTED, _started(process))
            try:
                if request.detach:
                    process.detach()
                    self.watch(sandbox, command)
                    return None
                relay = self._relay(command, call, stream=request.stream)
                return await self._read(sandbox, command, process, relay, call)
            finally:
                if feeding is not None and not request.detach:
                    feeding.cancel()

    async def attach(self, request: AttachExec, call: Call) -> ExecDone | None:
        sandbox = self._table.find(call.project, request.sandbox_id)
        check_exec_id(request.exec_id)
        offsets = request.stdout_offset, request.stderr_offset
        async with self._pauses.active(sandbox):
            command = sandbox.commands.note(request.exec_id)
            process = await self._open(
                sandbox,
                command,
                lambda channel: channel.attach(
                    request.exec_id, stdout_offset=offsets[0], stderr_offset=offsets[1]
                ),
            )
            await call.send(KIND_STARTED, _started(process))
            relay = self._relay(command, call, stream=request.stream)
            relay.begin(*offsets, limit_bytes=request.max_output_bytes)
            return await self._read(sandbox, command, process, relay, call)

    async def credit(self, credit: ExecCredit, call: Call) -> None:
        """Credit for a stream that has ended, or of another project, is for nobody."""
        sandbox = self._table.get(credit.sandbox_id)
        if sandbox is None or sandbox.origin.project != call.project:
            return
        command = sandbox.commands.get(credit.exec_id)
        if command is not None and command.window is not None:
            command.window.consumed(credit.consumed_bytes)

    def watch(self, sandbox: Sandbox, command: Command) -> None:
        """Hold the idle clock until a command that nobody reads has ended."""
        self._tasks.spawn(
            self._watch(sandbox, command), name=f"watch {command.exec_id}", waits=True
        )

    # --- inside ---

    async def _open(self, sandbox: Sandbox, command: Command, opening: Opening) -> AgentProcess:
        what = f"command {command.exec_id}"
        for attempt in (1, 2):
            try:
                with translated(what):
                    channel = await sandbox.holding.agent.channel()
                    async with command.attaching:
                        process = await opening(channel)
                        command.stdin_taken = process.stdin_received
                    return process
            except Unavailable:
                # An exec_id makes asking again safe; a dead sandbox will not get better.
                await self._raise_if_dead(sandbox)
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def _relay(self, command: Command, call: Call, *, stream: bool) -> Relay:
        command.window = Window(d.EXEC_WINDOW_BYTES)
        return Relay(call, command.exec_id, stream=stream, window=command.window)

    async def _read(
        self,
        sandbox: Sandbox,
        command: Command,
        process: AgentProcess,
        relay: Relay,
        call: Call,
    ) -> ExecDone:
        """To the command's end, over broken channels; an unfinished command goes on without us."""
        recorded = process.known and process.ended
        reading = asyncio.current_task()
        assert reading is not None
        self._reading.add(reading)
        progress = Progress(call, relay, command.exec_id, self._node.clock.monotonic_s)
        try:
            result = await self._to_the_end(sandbox, command, process, relay)
        except asyncio.CancelledError:
            self.watch(sandbox, command)
            raise
        finally:
            self._reading.discard(reading)
            progress.close()
        command.exit_code = result.exit_code
        record_span("agent run", result.started_ns, result.ended_ns)
        oom_killed = result.signal == 9 and await self._oom_killed(sandbox)
        self._node.fault(Point.BEFORE_REPLY)
        return exec_done(
            result, relay, what=command.title, program=command.program, recorded=recorded,
            oom_killed=oom_killed,
        )  # fmt: skip

    async def _to_the_end(
        self, sandbox: Sandbox, command: Command, process: AgentProcess, relay: Relay
    ) -> AgentResult:
        while True:
            try:
                await relay.run(process)
                return await process.wait()
            except AgentGoneError:
                process = await self._open(
                    sandbox,
                    command,
                    lambda channel: channel.attach(
                        command.exec_id,
                        stdout_offset=relay.stdout_offset,
                        stderr_offset=relay.stderr_offset,
                    ),
                )
            except AgentRefusedError as err:
                raise refusal(err, f"command {command.exec_id}") from err
            except asyncio.CancelledError:
                process.detach()
                raise

    def _feed(
        self, command: Command, process: AgentProcess, request: ExecRequest
    ) -> asyncio.Task[None] | None:
        """Standard input beside the output, so that neither waits for the other; what a repeated
        request brings again is not written twice."""
        if not request.stdin and not request.stdin_open:
            return None
        command.stdin_taken = max(process.stdin_received, len(request.stdin))
        return asyncio.create_task(
            _write(process, request.stdin[process.stdin_received :], close=not request.stdin_open)
        )

    async def _oom_killed(self, sandbox: Sandbox) -> bool:
        """Whether the kernel's OOM killer has struck in the sandbox since it was last asked."""
        if sandbox.holding.cgroup is None:
            return False
        kills = (await self._node.run(sandbox.holding.cgroup.stats)).memory.oom_kills
        told, sandbox.oom_kills_told = sandbox.oom_kills_told, kills
        return kills > told

    async def _raise_if_dead(self, sandbox: Sandbox) -> None:
        """A channel that breaks may be the first sign of a death that is known a moment later."""
        exited = sandbox.holding.exit is None or sandbox.holding.exit.ended
        if not (exited or sandbox.status.ending is not None or sandbox.gone.done()):
            await self._node.clock.sleep(_RECONNECT_S)
            exited = sandbox.holding.exit is None or sandbox.holding.exit.ended
        if exited or sandbox.status.ending is not None or sandbox.gone.done():
            try:
                async with asyncio.timeout(_DEATH_GRACE_S):
                    raise await asyncio.shield(sandbox.gone)
            except TimeoutError:
                raise SandboxDead(f"sandbox {sandbox.id} is ending") from None

    async def _watch(self, sandbox: Sandbox, command: Command) -> None:
        clock = self._node.clock
        sandbox.clocks.begin(clock.monotonic_s())
        try:
            while sandbox.usable:
                try:
                    channel = await sandbox.holding.agent.channel()
                    async with command.attaching:
                        if channel.attached(command.exec_id):
                            return  # somebody reads it now, and has it watched when he leaves
                        process = await channel.attach(command.exec_id, watch=True)
                    command.exit_code = (await process.wait()).exit_code
                    return
                except (AgentGoneError, Unavailable):
                    await clock.sleep(_RECONNECT_S)
                except AgentRefusedError:
                    return  # it has ended long ago, or somebody reads it now
        finally:
            sandbox.clocks.end(clock.monotonic_s())


async def _write(process: AgentProcess, data: bytes, *, close: bool) -> None:
    try:
        await process.write(data)
        if close:
            process.close_stdin()
    except AgentGoneError:
        return  # the reader notices too, and knows what to do


def _started(process: AgentProcess) -> ExecStarted:
    return ExecStarted(
        exec_id=process.exec_id,
        pid=process.pid or 0,
        resumed=process.known,
        stdin_offset=process.stdin_received,
    )
