"""The streams of a connection: a single answer, a command's output collected, or read in chunks.

Output flows against credit: ``WINDOW`` bytes are under way at most, and more are asked for as they
are consumed, so a slow reader slows the command down instead of filling the edge's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from . import codec
from .connection import AgentConnection
from .errors import AgentError, AgentGoneError, AgentProtocolError, AgentRefusedError
from .model import AgentResult, OnOutput, OutputChunk
from .protocol import ErrorCode, FrameType, OutputStream, StartedFlag

WINDOW = 256 * 1024
_RETURN = WINDOW // 4  # credit is given back in portions


def refused(payload: memoryview) -> AgentRefusedError:
    refusal = codec.decode_error(payload)
    return AgentRefusedError(refusal.code, refusal.errno, refusal.message)


def _superseded(error: AgentError) -> bool:
    return isinstance(error, AgentRefusedError) and error.code is ErrorCode.SUPERSEDED


class Answer:
    """KILL, LIST, PING, SHUTDOWN: one frame of a known type, or ERROR."""

    def __init__(self, expected: FrameType) -> None:
        self._expected = expected
        self.payload: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_frame(self, kind: int, payload: memoryview) -> bool:
        if kind not in (self._expected, FrameType.ERROR):
            raise AgentProtocolError(f"frame of type {kind:#x} instead of {self._expected.name}")
        if not self.payload.done():
            if kind == FrameType.ERROR:
                self.payload.set_exception(refused(payload))
            else:
                self.payload.set_result(bytes(payload))
        return True

    def on_gone(self, error: AgentError) -> None:
        if not self.payload.done():
            self.payload.set_exception(AgentGoneError(str(error)))


class Stdin:
    """Bytes on their way to a command, at most one window of them beyond what its pipe took."""

    def __init__(self, connection: AgentConnection, stream: int, limit: int) -> None:
        self._connection = connection
        self._stream = stream
        self._waiting: deque[memoryview] = deque()
        self._offset = 0
        self._limit = limit
        self._closing = False
        self._closed = False
        self._lost = False
        self._drained = asyncio.Event()

    @property
    def position(self) -> int:
        """Where the next bytes go: what was sent, and what waits to be."""
        return self._offset + sum(map(len, self._waiting))

    def resume(self, received: int, limit: int) -> None:
        """Attached to a command that has had `received` bytes already."""
        self._offset = max(self._offset, received)
        self.allow(limit)

    def allow(self, limit: int) -> None:
        self._limit = max(self._limit, limit)
        self._pump()

    def push(self, data: bytes) -> None:
        self._waiting.append(memoryview(data))
        self._pump()

    def close(self) -> None:
        self._closing = True
        self._pump()

    def abandon(self) -> None:
        """The command has ended: nobody reads what is left."""
        self._waiting.clear()
        self._drained.set()

    def lose(self) -> None:
        """Nobody sends what is left: its writers are told, and may send it again elsewhere."""
        self._lost = bool(self._waiting)
        self.abandon()

    def inherit(self, before: Stdin) -> None:
        """Go on with what an attachment that we have superseded had not sent yet."""
        self._waiting, before._waiting = before._waiting, deque()
        self._closing, self._closed = before._closing, before._closed
        self._drained, before._drained = before._drained, asyncio.Event()  # its writers wait for us
        self._pump()

    async def drained(self) -> None:
        """Raises AgentGoneError: not all of it was sent."""
        await self._drained.wait()
        if self._lost:
            raise AgentGoneError("the attachment that was to send the input has ended")

    def _pump(self) -> None:
        while self._waiting and self._offset < self._limit:
            data = self._waiting.popleft()
            part = data[: min(self._limit - self._offset, len(data))]
            if len(part) < len(data):
                self._waiting.appendleft(data[len(part) :])
            self._connection.send(codec.encode_stdin(self._stream, self._offset, part))
            self._offset += len(part)
        if self._waiting:
            self._drained.clear()
            return
        self._drained.set()
        if self._closing and not self._closed:
            self._closed = True
            self._connection.send(codec.encode_frame(FrameType.CLOSE_STDIN, self._stream))


class ExecStream:
    """What EXEC, FILE and ATTACH have in common. Subclasses say where the output goes."""

    def __init__(self, connection: AgentConnection, exec_id: str, stdin_limit: int) -> None:
        loop = asyncio.get_running_loop()
        self.exec_id = exec_id
        self.number = connection.open_stream(self)
        self.started: asyncio.Future[codec.Started] = loop.create_future()
        self.ended: asyncio.Future[codec.Exit] = loop.create_future()
        self.stdin = Stdin(connection, self.number, stdin_limit)
        self.over = False  # unlike the futures, not touched by a waiter that is cancelled
        self._connection = connection
        self._consumed = 0

    def detach(self) -> None:
        """Leave it: the command goes on, a file operation is given up."""
        self._connection.forget_stream(self.number)
        if not self.over:
            with contextlib.suppress(AgentGoneError):
                self._connection.send(codec.encode_frame(FrameType.DETACH, self.number))
            self._fail(AgentGoneError(f"detached from {self.exec_id}"))

    def on_output(self, stream: OutputStream, offset: int, data: memoryview) -> None:
        raise NotImplementedError

    def on_end(self) -> None:
        """Nothing more will come."""

    def consumed(self, count: int) -> None:
        self._consumed += count
        if self._consumed >= _RETURN and not self.over:
            self._connection.send(codec.encode_u32(FrameType.CREDIT, self.number, self._consumed))
            self._consumed = 0

    def on_frame(self, kind: int, payload: memoryview) -> bool:
        if kind == FrameType.OUTPUT:
            self.on_output(*codec.decode_output(payload))
        elif kind == FrameType.STDIN_CREDIT:
            self.stdin.allow(codec.decode_u64(payload))
        elif kind == FrameType.STARTED:
            self._on_started(codec.decode_started(payload))
        elif kind == FrameType.EXIT:
            self._on_exit(codec.decode_exit(payload))
            return True
        elif kind == FrameType.ERROR:
            self._fail(refused(payload))
            return True
        else:
            raise AgentProtocolError(f"frame of type {kind:#x} for a command")
        return False

    def on_gone(self, error: AgentError) -> None:
        self._fail(AgentGoneError(str(error)))

    def _on_started(self, started: codec.Started) -> None:
        if not self.started.done():
            self.started.set_result(started)
        self.stdin.allow(started.stdin_limit)

    def _on_exit(self, exit_: codec.Exit) -> None:
        if not self.started.done():
            raise AgentProtocolError("EXIT before STARTED")
        if not self.ended.done():
            self.ended.set_result(exit_)
        self.over = True
        self.stdin.abandon()
        self.on_end()

    def _fail(self, error: AgentError) -> None:
        for future in (self.started, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: not everybody waits for both
        self.over = True
        if not _superseded(error):  # else the one who took over goes on with the input
            self.stdin.lose()
        self.on_end()

    def result(self, stdout: bytes = b"", stderr: bytes = b"") -> AgentResult:
        exit_, started = self.ended.result(), self.started.result()
        return AgentResult(
            exec_id=self.exec_id,
            exit_code=exit_.exit_code,
            signal=exit_.signal or None,
            stdout=stdout,
            stderr=stderr,
            stdout_total=exit_.stdout_total,
            stderr_total=exit_.stderr_total,
            stdout_dropped=exit_.stdout_dropped,
            stderr_dropped=exit_.stderr_dropped,
            started_ns=exit_.started_ns,
            ended_ns=exit_.ended_ns,
            reason=exit_.reason,
            stage=exit_.stage,
            errno=exit_.errno,
            flags=exit_.flags,
            value=exit_.value,
            known=StartedFlag.KNOWN in started.flags,
        )


class CollectingStream(ExecStream):
    """Keeps all output, which the capture limit bounds, and shows it to a callback."""

    def __init__(
        self,
        connection: AgentConnection,
        exec_id: str,
        stdin_limit: int,
        on_output: OnOutput | None = None,
    ) -> None:
        super().__init__(connection, exec_id, stdin_limit)
        self._callback = on_output
        self._parts: dict[OutputStream, list[bytes]] = {stream: [] for stream in OutputStream}

    def on_output(self, stream: OutputStream, offset: int, data: memoryview) -> None:
        kept = bytes(data)
        self._parts[stream].append(kept)
        if self._callback is not None:
            self._callback(stream, offset, kept)
        self.consumed(len(kept))

    def collected(self) -> AgentResult:
        return self.result(*(b"".join(self._parts[stream]) for stream in OutputStream))


class ReadingStream(ExecStream):
    """Holds at most one window until somebody iterates; credit goes back as chunks are taken."""

    def __init__(self, connection: AgentConnection, exec_id: str, stdin_limit: int) -> None:
        super().__init__(connection, exec_id, stdin_limit)
        self._chunks: deque[OutputChunk] = deque()
        self._more = asyncio.Event()
        self._discarding = False

    def on_output(self, stream: OutputStream, offset: int, data: memoryview) -> None:
        if self._discarding:
            self.consumed(len(data))
            return
        self._chunks.append(OutputChunk(stream, offset, bytes(data)))
        self._more.set()

    def on_end(self) -> None:
        self._more.set()

    def discard(self) -> None:
        """From now on output is thrown away as it comes."""
        self._discarding = True
        while self._chunks:
            self.consumed(len(self._chunks.popleft().data))

    async def chunks(self) -> AsyncIterator[OutputChunk]:
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self.consumed(len(chunk.data))
                yield chunk
            if self.over:
                self.ended.result()  # raises if it was the connection that ended
                return
            self._more.clear()
            await self._more.wait()
