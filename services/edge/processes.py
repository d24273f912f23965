"""The commands of a sandbox from the outside: their input, signals to them, the list of them."""

from __future__ import annotations

from libdsec.bus import Call
from libdsec.errors import InvalidArgument
from libdsec.wire.execution import ProcessInfo, ProcessInput, ProcessListing, ProcessSignal
from libdsec.wire.model import Empty
from libdsec.wire.sandbox import ById

from . import agent
from .agent import AgentChannel, AgentGoneError, KillScope, ProcessState
from .agent_errors import translated
from .command import Command
from .exec_spec import check_exec_id
from .node import Node
from .pause import Pauses
from .sandbox import Sandbox
from .table import Table

_LAST_SIGNAL = 64


class Processes:
    """input, signal, list."""

    def __init__(self, node: Node, table: Table, pauses: Pauses) -> None:
        self._node = node
        self._table = table
        self._pauses = pauses

    async def input(self, request: ProcessInput, call: Call) -> Empty:
        """Bytes that were taken already are skipped, so that a call may be repeated.

        Raises:
            InvalidArgument: bytes are missing before these.
        """
        sandbox = self._table.find(call.project, request.sandbox_id)
        check_exec_id(request.exec_id)
        async with self._pauses.active(sandbox):
            command = sandbox.commands.note(request.exec_id)
            with translated(f"command {request.exec_id}"):
                channel = await sandbox.holding.agent.channel()
                async with command.stdin_lock:
                    await self._write(channel, command, request)
        return Empty()

    async def signal(self, request: ProcessSignal, call: Call) -> Empty:
        """Nothing left to signal is as good as signalled; SIGKILL to a tree returns when it is
        gone."""
        sandbox = self._table.find(call.project, request.sandbox_id)
        check_exec_id(request.exec_id)
        if not 1 <= request.signal <= _LAST_SIGNAL:
            raise InvalidArgument(f"signal {request.signal} does not exist")
        scope = KillScope.TREE if request.tree else KillScope.GROUP
        async with self._pauses.active(sandbox):
            with translated(f"command {request.exec_id}"):
                channel = await sandbox.holding.agent.channel()
                await channel.kill(request.exec_id, request.signal, scope=scope)
        return Empty()

    async def list(self, request: ById, call: Call) -> ProcessListing:
        sandbox = self._table.find(call.project, request.sandbox_id)
        async with self._pauses.active(sandbox):
            with translated(f"processes of {sandbox.id}"):
                channel = await sandbox.holding.agent.channel()
                found = await channel.processes()
        return ProcessListing(processes=tuple(self._info(sandbox, one) for one in found))

    async def _write(self, channel: AgentChannel, command: Command, request: ProcessInput) -> None:
        async with command.attaching:
            if command.stdin_taken is None or not channel.attached(request.exec_id):
                # Since the edge restarted, or a reader left: the agent knows how far it is.
                process = await channel.attach(request.exec_id, watch=True)
                command.stdin_taken = process.stdin_received
        if request.offset > command.stdin_taken:
            raise InvalidArgument(
                f"input at {request.offset}, but {command.stdin_taken} bytes have been taken",
                hint="send what is missing first",
            )
        data = request.data[command.stdin_taken - request.offset :]
        command.stdin_taken += len(data)  # queued from here on, also if we are not waited for
        try:
            await channel.write_stdin(request.exec_id, data)
        except AgentGoneError:
            if not channel.attached(request.exec_id):
                command.stdin_taken = None  # not all of it was sent; the agent knows how much
            raise
        if request.close:
            await channel.close_stdin(request.exec_id)

    def _info(self, sandbox: Sandbox, found: agent.ProcessInfo) -> ProcessInfo:
        command = sandbox.commands.get(found.exec_id)
        age_s = self._node.clock.monotonic_s() - found.started_ns / 1e9
        return ProcessInfo(
            exec_id=found.exec_id,
            pid=found.pid or 0,
            argv=command.argv if command is not None else (),
            running=found.state is ProcessState.RUNNING,
            started_at=self._node.clock.wall_s() - age_s,
            exit_code=command.exit_code if command is not None else None,
        )
