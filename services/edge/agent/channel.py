"""The agent channel: everything an edge does inside one sandbox goes through one of these."""

from __future__ import annotations

import asyncio
import signal as signals
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from . import codec
from .connection import AgentConnection
from .errors import AgentError, AgentGoneError
from .files import AgentFiles
from .model import AgentResult, ExecSpec, Hello, OnOutput, ProcessInfo
from .process import AgentProcess
from .protocol import AttachFlag, FrameType, KillScope
from .stream import WINDOW, Answer, CollectingStream, ReadingStream

ANSWER_TIMEOUT_S = 15.0  # longer than the 10 s for which the agent waits for a killed tree
_ESRCH = 3


class AgentChannel:
    """Lifecycle: ``connect`` to ``aclose`` (or the first ``AgentGoneError``); never reconnects."""

    def __init__(self, connection: AgentConnection, hello: Hello) -> None:
        self.hello = hello
        self.files = AgentFiles(connection, hello.stdin_window)
        self._connection = connection
        self._processes: dict[str, ReadingStream] = {}

    @classmethod
    async def connect(cls, path: Path | str, *, timeout_s: float = 5.0) -> AgentChannel:
        """Connect to the agent's socket; an edge connected before is thrown out."""
        try:
            async with asyncio.timeout(timeout_s):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_unix_connection(AgentConnection, str(path))
                try:
                    return cls(connection, await connection.hello)
                except BaseException:
                    connection.close(AgentGoneError("connecting was given up"))
                    raise
        except OSError as err:  # TimeoutError is one
            raise AgentGoneError(f"agent at {path}: {str(err) or 'no hello in time'}") from err

    @property
    def closed(self) -> bool:
        """The connection is down; a new one has to be made."""
        return self._connection.closed.done()

    async def wait_closed(self) -> AgentError:
        """Returns, once the connection is down, why."""
        return await asyncio.shield(self._connection.closed)

    async def aclose(self) -> None:
        """Commands go on; file operations under way are given up."""
        self._connection.close(AgentGoneError("closed by this edge"))
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await self.wait_closed()

    # --- commands ---

    async def exec(
        self, spec: ExecSpec, *, stdin: bytes = b"", on_output: OnOutput | None = None
    ) -> AgentResult:
        """Run it and collect its output; a repeat of a known exec_id gets that one's result.

        Cancelling leaves the command running. ``capture_bytes`` None collects without bound.
        """
        if stdin:
            spec = replace(spec, stdin_pipe=True)
        window = self.hello.stdin_window if spec.stdin_pipe else 0
        stream = CollectingStream(self._connection, spec.exec_id, window, on_output)
        try:
            self._connection.send(codec.encode_exec(stream.number, spec, WINDOW))
            if spec.stdin_pipe:
                stream.stdin.push(stdin)
                stream.stdin.close()
            await stream.ended
        finally:
            stream.detach()
        return stream.collected()

    async def collect(self, exec_id: str, *, on_output: OnOutput | None = None) -> AgentResult:
        """Wait for a command started before, with all of its output that is kept; never runs it."""
        stream = CollectingStream(self._connection, exec_id, 0, on_output)
        try:
            self._connection.send(
                codec.encode_attach(stream.number, exec_id, WINDOW, (0, 0), AttachFlag(0))
            )
            await stream.ended
        finally:
            stream.detach()
        return stream.collected()

    async def start(self, spec: ExecSpec, *, watch: bool = False) -> AgentProcess:
        """Start it; with ``watch`` only its end is reported, and its output never blocks it."""
        window = self.hello.stdin_window if spec.stdin_pipe else 0
        stream = ReadingStream(self._connection, spec.exec_id, window)
        return await self._opened(
            stream, lambda: codec.encode_exec(stream.number, spec, WINDOW, watch=watch)
        )

    async def attach(
        self,
        exec_id: str,
        *,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        watch: bool = False,
    ) -> AgentProcess:
        """Take over its output from these offsets; whoever was attached before is refused."""
        stream = ReadingStream(self._connection, exec_id, 0)
        offsets = (stdout_offset, stderr_offset)
        flags = AttachFlag.WATCH if watch else AttachFlag(0)
        return await self._opened(
            stream, lambda: codec.encode_attach(stream.number, exec_id, WINDOW, offsets, flags)
        )

    async def _opened(self, stream: ReadingStream, request: Callable[[], bytes]) -> AgentProcess:
        before = self._processes.get(stream.exec_id)
        try:
            self._connection.send(request())
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                started = await stream.started
        except BaseException as err:
            stream.detach()
            if before is not None and before.over:
                before.stdin.lose()
            if isinstance(err, TimeoutError):
                raise AgentGoneError(f"no answer to {stream.exec_id}") from err
            raise
        stream.stdin.resume(started.stdin_received, started.stdin_limit)
        if before is not None:
            stream.stdin.inherit(before.stdin)
        self._processes[stream.exec_id] = stream
        stream.ended.add_done_callback(lambda _: self._left(stream))
        return AgentProcess(stream)

    def _left(self, stream: ReadingStream) -> None:
        if self._processes.get(stream.exec_id) is stream:
            del self._processes[stream.exec_id]

    def attached(self, exec_id: str) -> bool:
        """Whether `write_stdin` knows this command."""
        return exec_id in self._processes

    async def write_stdin(self, exec_id: str, data: bytes) -> None:
        """To a command that this channel has started or attached to."""
        await self._process(exec_id).write(data)

    async def close_stdin(self, exec_id: str) -> None:
        self._process(exec_id).close_stdin()

    def _process(self, exec_id: str) -> AgentProcess:
        stream = self._processes.get(exec_id)
        if stream is None:
            raise ProcessLookupError(f"{exec_id} is not attached to, or has ended")
        return AgentProcess(stream)

    async def kill(
        self,
        exec_id: str,
        signal: int = signals.SIGKILL,
        *,
        scope: KillScope = KillScope.TREE,
    ) -> bool:
        """Signal it. A killed tree is gone on return. False: nothing of it was alive."""
        answer = Answer(FrameType.DONE)
        number = self._connection.open_stream(answer)
        self._connection.send(codec.encode_kill(number, exec_id, signal, scope))
        errno = codec.decode_u32(memoryview(await self._answered(number, answer)))
        if errno and errno != _ESRCH:
            raise OSError(errno, f"kill {exec_id}: processes remain")
        return errno == 0

    # --- the sandbox as a whole ---

    async def processes(self) -> tuple[ProcessInfo, ...]:
        return codec.decode_processes(
            memoryview(await self._ask(FrameType.LIST, FrameType.PROCESSES))
        )

    async def ping(self) -> float:
        """Seconds there and back."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await self._ask(FrameType.PING, FrameType.PONG)
        return loop.time() - begun

    def frozen_for(self, seconds: float) -> None:
        """Before thawing: deadlines move by the time the sandbox was frozen."""
        self._connection.send(codec.encode_u64(FrameType.FROZEN_FOR, 0, round(seconds * 1e9)))

    async def shutdown(self, grace_s: float) -> None:
        """TERM to every process, KILL after the grace; the agent exits after answering."""
        answer = Answer(FrameType.DONE)
        number = self._connection.open_stream(answer)
        grace_ms = round(grace_s * 1000)
        self._connection.send(codec.encode_u32(FrameType.SHUTDOWN, number, grace_ms))
        await self._answered(number, answer, ANSWER_TIMEOUT_S + grace_s)

    async def _ask(self, request: FrameType, expected: FrameType) -> bytes:
        answer = Answer(expected)
        number = self._connection.open_stream(answer)
        self._connection.send(codec.encode_frame(request, number))
        return await self._answered(number, answer)

    async def _answered(
        self, number: int, answer: Answer, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await answer.payload
        except TimeoutError as err:
            raise AgentGoneError(f"no answer within {timeout_s} s") from err
        finally:
            self._connection.forget_stream(number)
