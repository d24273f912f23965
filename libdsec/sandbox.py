"""One sandbox, as its owner holds it: commands, files, its life.

A handle knows the sandbox's id, which routes by itself; it holds nothing that could go stale.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from .callback import Callback
from .command import Cmd, command, feed, kill_tree, run, with_input
from .connection import CALL_TIMEOUT_S, Connection
from .errors import DSecError, NotFound, SandboxDead, Unsupported
from .exec_result import ExecResult
from .execution import Reading
from .files import Files
from .process import Process
from .spec import check_seconds
from .wire.defaults import EXEC_TIMEOUT_S, MAX_OUTPUT_BYTES, MAX_OUTPUT_LIMIT
from .wire.envelope import Rpc
from .wire.execution import ProcessInfo
from .wire.ids import sandbox_node
from .wire.layer import LayerInfo
from .wire.model import Message
from .wire.sandbox import (
    AuditLog,
    Backend,
    ById,
    ExtendSandbox,
    NetworkNone,
    NetworkSpec,
    PauseResult,
    PauseSandbox,
    ResumeResult,
    SandboxInfo,
    SandboxMetrics,
    SetNetwork,
    SetPhase,
    StopSandbox,
)
from .wire.subjects import (
    AUDIT,
    EXTEND,
    INFO,
    METRICS,
    PAUSE,
    PROCESSES,
    RESUME,
    SET_NETWORK,
    SET_PHASE,
    STOP,
)

_log = logging.getLogger("libdsec.sandbox")

Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)

_LIFECYCLE_S = 60.0


class Sandbox:
    """A running sandbox; as a context manager it is stopped at the end.

    Attributes:
        id: names it for good, and the node it is on.
        node, backend, labels: as they were made.
        files: what is inside, see `libdsec.files.Files`.
        request_id: of the create, for `dsec trace`; "" where it is not known.
        phases_ms: what the create's phases took.
    """

    def __init__(
        self,
        connection: Connection,
        sandbox_id: str,
        *,
        backend: Backend,
        labels: Mapping[str, str],
        request_id: str = "",
        phases_ms: Mapping[str, float] | None = None,
    ) -> None:
        self._connection = connection
        self.id = sandbox_id
        self.node = sandbox_node(sandbox_id)
        self.backend = backend
        self.labels = dict(labels)
        self.request_id = request_id
        self.phases_ms = dict(phases_ms or {})
        self.files = Files(connection, sandbox_id)

    def __repr__(self) -> str:
        return f"<Sandbox {self.id}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.stop()
        except DSecError as failure:
            if err is None:
                raise
            _log.warning("sandbox %s was not stopped: %s", self.id, failure)

    def bound_to(self, connection: Connection) -> Sandbox:
        """The same sandbox, reached over this connection."""
        if connection is self._connection:
            return self
        return Sandbox(
            connection, self.id, backend=self.backend, labels=self.labels,
            request_id=self.request_id, phases_ms=self.phases_ms,
        )  # fmt: skip

    # --- commands ---------------------------------------------------------------------------------

    async def exec(
        self,
        cmd: Cmd,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: bytes | str | None = None,
        timeout: float | None = EXEC_TIMEOUT_S,
        on_stdout: Callback[str] | None = None,
        on_stderr: Callback[str] | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        exec_id: str | None = None,
    ) -> ExecResult:
        """Run a command and wait for it. A non-zero exit code is a result.

        Args:
            cmd: a list is the argument vector, a string is run by /bin/sh -c.
            stdin: what it reads; nothing by default.
            timeout: after it the whole process tree is killed; None: no limit.
            on_stdout, on_stderr: called with text as it comes.
            max_output_bytes: how much of each stream is kept.
            exec_id: makes it idempotent: a repeat attaches to the running command or returns the
                recorded result. Without one, a cancelled call kills the command.

        Raises:
            ExecTimeout: with the partial result.
            SandboxDead: with the reason.
            Unavailable: the node does not answer; whether the command ran is unknown.
            InvalidArgument: the command or its user cannot be.
        """
        with self._connection.operation("exec", node=self.node) as op:
            request, fed = with_input(
                command(
                    self.id, cmd, cwd=cwd, env=env, user=user, timeout=timeout,
                    max_output_bytes=max_output_bytes, exec_id=exec_id,
                    stream=on_stdout is not None or on_stderr is not None,
                ),
                stdin,
            )  # fmt: skip
            try:
                return await run(self._connection, op, request, fed, on_stdout, on_stderr)
            except DSecError:
                raise
            except BaseException:
                if exec_id is None:  # nobody can come back for it
                    self._connection.spawn(kill_tree(self._connection, op, request))
                raise

    async def run_shell(self, command: str, timeout: float | None = EXEC_TIMEOUT_S) -> ExecResult:
        """`exec` with a string."""
        return await self.exec(command, timeout=timeout)

    async def start(
        self,
        cmd: Cmd,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: bytes | str | None = None,
        timeout: float | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        exec_id: str | None = None,
        tty: bool = False,
    ) -> Process:
        """Start a command that lives on by itself.

        Args:
            stdin: None leaves the input open for `Process.write`.
            max_output_bytes: how much of each stream `Process.wait` keeps.
        """
        with self._connection.operation("start", node=self.node) as op:
            request, fed = with_input(
                command(
                    self.id, cmd, cwd=cwd, env=env, user=user, timeout=timeout,
                    max_output_bytes=MAX_OUTPUT_LIMIT, exec_id=exec_id, tty=tty, detach=True,
                ),
                stdin,
            )  # fmt: skip
            if stdin is None:
                request = request.model_copy(update={"stdin_open": True})
            reading = Reading(self._connection, op, self.id, request.exec_id, capture_bytes=0)
            await reading.begin(request)
            if fed:
                self._connection.spawn(feed(self._connection, op, request, fed))
        return self._process(reading, request.exec_id, (0, 0), max_output_bytes)

    async def attach(
        self,
        exec_id: str,
        offset: int = 0,
        *,
        stderr_offset: int = 0,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Process:
        """Find a command again, to read on from these offsets.

        Raises:
            NotFound: no command of that id is remembered.
        """
        with self._connection.operation("attach", node=self.node) as op:
            offsets = (offset, stderr_offset)
            reading = Reading(
                self._connection, op, self.id, exec_id, capture_bytes=0, offsets=offsets
            )
            await reading.begin(None)
        return self._process(reading, exec_id, offsets, max_output_bytes)

    async def processes(self) -> list[ProcessInfo]:
        """The commands that run, and those whose result is still kept."""
        return list((await self._ask("processes", PROCESSES, ById(sandbox_id=self.id))).processes)

    # --- life -------------------------------------------------------------------------------------

    async def info(self) -> SandboxInfo:
        """State, policy generation, times."""
        return await self._ask("info", INFO, ById(sandbox_id=self.id))

    async def metrics(self) -> SandboxMetrics:
        """CPU, memory, disk, processes."""
        return await self._ask("metrics", METRICS, ById(sandbox_id=self.id))

    async def pause(self, *, reclaim: bool = True) -> PauseResult:
        """Freeze it and give its memory back. Idempotent."""
        message = PauseSandbox(sandbox_id=self.id, reclaim=reclaim)
        return await self._ask("pause", PAUSE, message, budget_s=_LIFECYCLE_S)

    async def resume(self) -> ResumeResult:
        """Let it run again; exec, start, files and the like do so by themselves."""
        return await self._ask(
            "resume", RESUME, ById(sandbox_id=self.id), budget_s=_LIFECYCLE_S
        )  # fmt: skip

    async def stop(self) -> None:
        """End it and free everything it holds. Idempotent; a paused one is not resumed for it."""
        try:
            await self._ask("stop", STOP, StopSandbox(sandbox_id=self.id), budget_s=_LIFECYCLE_S)
        except (SandboxDead, NotFound):
            return  # it is gone, and nobody remembers it for ever

    async def extend(
        self, idle_timeout_s: float | None = None, max_lifetime_s: float | None = None
    ) -> SandboxInfo:
        """Set new limits of its life, counted as at create; None leaves one as it is."""
        with self._connection.operation("extend", node=self.node) as op:
            message = ExtendSandbox(
                sandbox_id=self.id,
                idle_timeout_s=_seconds("idle_timeout_s", idle_timeout_s),
                max_lifetime_s=_seconds("max_lifetime_s", max_lifetime_s),
            )
            return await self._connection.call(
                EXTEND, message, op=op, node=self.node, idempotent=True
            )

    async def set_network(self, network: NetworkSpec | None = None) -> int:
        """Replace the whole rule set at once; returns the generation now in force.

        Args:
            network: `Network.none()` when left out, never "as before".
        """
        message = SetNetwork(sandbox_id=self.id, network=network or NetworkNone())
        return (await self._ask("set_network", SET_NETWORK, message)).generation

    async def set_phase(self, name: str) -> int:
        """Switch to a rule set named at create; returns the generation now in force."""
        message = SetPhase(sandbox_id=self.id, name=name)
        return (await self._ask("set_phase", SET_PHASE, message)).generation

    async def audit(self) -> AuditLog:
        """What was denied; `dropped` says how much is not listed."""
        return await self._ask("audit", AUDIT, ById(sandbox_id=self.id))

    # --- not built yet ----------------------------------------------------------------------------

    async def session(self, name: str = "default") -> object:
        """A persistent shell."""
        self._unbuilt("session", "exec runs each command by itself")

    async def pack_diff(
        self, name: str, *, exclude: Sequence[str] = (), wait: bool = True
    ) -> LayerInfo:
        """The writable layer as a new immutable layer."""
        self._unbuilt("pack_diff", "download a tree and publish it")

    async def fork(self, n: int, memory: bool = False) -> list[Sandbox]:
        """New sandboxes from this one's disk."""
        self._unbuilt("fork", "create_many from the same layers")

    async def forward(self, port: int) -> tuple[str, int]:
        """A local address that reaches a port inside."""
        self._unbuilt("forward", "exec a client inside the sandbox")

    async def http(self, port: int, request: object) -> object:
        """A request to a service inside."""
        self._unbuilt("http", "exec a client inside the sandbox")

    def _unbuilt(self, name: str, instead: str) -> NoReturn:
        self._connection.refuse(name, Unsupported(f"{name} is not built yet", hint=instead))

    async def _ask(
        self, verb: str, rpc: Rpc[Req, Rep], message: Req, *, budget_s: float = CALL_TIMEOUT_S
    ) -> Rep:
        with self._connection.operation(verb, node=self.node) as op:
            # Each of these states what is to be, or only asks.
            return await self._connection.call(
                rpc, message, op=op, node=self.node, budget_s=budget_s, idempotent=True
            )

    def _process(
        self, reading: Reading, exec_id: str, offsets: tuple[int, int], max_output_bytes: int
    ) -> Process:
        started = reading.started.result() if reading.started.done() else None
        return Process(
            self._connection, self.id, exec_id, started.pid if started else 0,
            offsets=offsets,
            stdin_offset=started.stdin_offset if started else 0,
            max_output_bytes=max_output_bytes,
        )  # fmt: skip


def _seconds(what: str, value: float | None) -> float | None:
    return None if value is None else check_seconds(what, value)
