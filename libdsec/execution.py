"""A command's reply stream, read to its end across lost connections.

A command is never dispatched twice: once it may have been taken, only *attaching* by its `exec_id`
continues the stream, from the offsets already seen, so nothing is lost or repeated. Only a request
that was refused before anything happened (see `libdsec.connection`) is sent again.

A quiet command and a lost node look different: the edge says something every EXEC_PROGRESS_S, so
three silent intervals mean that the stream is broken, and a node that cannot be attached to for a
lease after that is reported as not answering.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from typing import Literal

from .bus import Bus, Conversation, Part
from .connection import Connection, named
from .errors import DataLoss, DeadlineExceeded, DSecError, NotFound, Unavailable
from .exec_result import ExecResult
from .operation import Operation
from .wire.defaults import EXEC_PROGRESS_S, EXEC_WINDOW_BYTES, LEASE_S, MAX_OUTPUT_LIMIT
from .wire.envelope import H_OFFSET, H_STREAM
from .wire.execution import (
    KIND_OUTPUT,
    KIND_STARTED,
    AttachExec,
    ExecCredit,
    ExecDone,
    ExecRequest,
    ExecStarted,
)
from .wire.ids import sandbox_node
from .wire.subjects import ATTACH, EXEC, EXEC_CREDIT

SILENCE_S = 3 * EXEC_PROGRESS_S
_ATTACH_ANSWER_S = EXEC_PROGRESS_S
_RETRY_S = 1.0
# On top of the command's own timeout: starting it, and bringing its output home.
_MARGIN_S = 60.0
_UNBOUNDED_S = 7 * 86_400.0
_PARTS_UNREAD = 4096  # small chunks may be many; more than this and the stream is attached anew

_STREAM, _OFFSET = H_STREAM.lower(), H_OFFSET.lower()

StreamName = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class Output:
    """A piece of a command's output; `offset` is that of its first byte in its stream."""

    stream: StreamName
    data: bytes
    offset: int


class Capture:
    """One stream's first `limit` bytes, put together from chunks that may overlap."""

    def __init__(self, name: StreamName, limit: int, offset: int = 0) -> None:
        self.name = name
        self.position = self._first = offset  # of the next byte that has not been seen
        self._limit = limit
        self._data = bytearray()

    def take(self, offset: int, data: bytes) -> Iterator[Output]:
        """Keep a chunk as far as there is room; gives what of it is new."""
        new = data[max(0, self.position - offset) :]
        if new:
            # A gap is what the agent's ring had to drop; the totals in the result tell of it.
            self.position = offset + len(data)
            self._data += new[: self._limit - len(self._data)]
            yield Output(self.name, new, self.position - len(new))

    def captured(self) -> bytes:
        return bytes(self._data)

    def lacks(self, total: int) -> bool:
        """Whether something that was written from the first offset on was not captured."""
        return self._first + len(self._data) < total


class _Credit:
    """How much of one reply stream has been consumed, told a quarter of the window at a time."""

    def __init__(self) -> None:
        self._consumed = 0
        self._told = 0

    def due(self, part: Part) -> int | None:
        """The total to tell the edge now, if it is time."""
        if part.kind == KIND_OUTPUT:
            self._consumed += len(part.data)
        if self._consumed - self._told < EXEC_WINDOW_BYTES // 4:
            return None
        self._told = self._consumed
        return self._told


class Reading:
    """One reader of one command: `outputs` to the end, then `result`."""

    def __init__(
        self,
        connection: Connection,
        op: Operation,
        sandbox_id: str,
        exec_id: str,
        *,
        capture_bytes: int,
        offsets: tuple[int, int] = (0, 0),
        stream: bool = True,
    ) -> None:
        self._connection = connection
        self._op = op
        self._sandbox_id = sandbox_id
        self._node = sandbox_node(sandbox_id)
        self._exec_id = exec_id
        self._stream = stream  # whether output is wanted before the end
        self.stdout = Capture("stdout", capture_bytes, offsets[0])
        self.stderr = Capture("stderr", capture_bytes, offsets[1])
        self.started: asyncio.Future[ExecStarted] = asyncio.get_running_loop().create_future()
        self.done: ExecDone | None = None
        self._patience_until: float | None = None  # set at the first failure of a row

    @property
    def result(self) -> ExecResult:
        """What the ended command left behind, its output as far as it was captured."""
        done = self.done
        if done is None:
            raise RuntimeError("the command has not ended")
        lacks = self.stdout.lacks(done.stdout_total) or self.stderr.lacks(done.stderr_total)
        return ExecResult(
            exit_code=done.exit_code,
            signal=done.signal,
            stdout_bytes=self.stdout.captured(),
            stderr_bytes=self.stderr.captured(),
            stdout_total=done.stdout_total,
            stderr_total=done.stderr_total,
            truncated=done.truncated or lacks,
            duration_s=done.duration_s,
            oom_killed=done.oom_killed,
            request_id=self._op.request_id,
        )

    @property
    def timed_out(self) -> bool:
        return self.done is not None and self.done.timed_out

    async def outputs(
        self, request: ExecRequest | None = None, *, until_started: bool = False
    ) -> AsyncGenerator[Output, None]:
        """Run `request`, or attach to what runs, and yield the output as it comes.

        The consumer's pace is the command's: more output is granted only as this is iterated.

        Args:
            until_started: end as soon as the command is known to have started.

        Raises:
            Unavailable: the node cannot be reached, or the command's fate is unknown.
            DSecError: what the edge refused it with, SandboxDead included.
        """
        cause: DSecError | None = None
        while self.done is None and not (until_started and self.started.done()):
            try:
                async for output in self._converse(request, until_started):
                    yield output
            except NotFound as err:
                if cause is None:
                    raise
                raise self._no_record(cause) from err
            except (Unavailable, DeadlineExceeded, DataLoss) as err:
                cause = self._lost(err)
                if err.retry_after_s is None or self.started.done():
                    request = None
                await self._pause(err, cause)

    async def begin(self, request: ExecRequest | None) -> None:
        """Start `request`, or find what runs, and leave it to itself.

        Raises:
            DSecError: as `outputs`.
        """
        async with aclosing(self.outputs(request, until_started=True)) as outputs:
            async for _ in outputs:
                return  # it has output, so it has started

    async def _converse(
        self, request: ExecRequest | None, until_started: bool
    ) -> AsyncGenerator[Output, None]:
        """One conversation with the edge, until it ends or breaks."""
        bus = await self._connection.bus()
        await bus.usable(timeout_s=LEASE_S)
        asked_from = (0, 0) if request else (self.stdout.position, self.stderr.position)
        answer_s = SILENCE_S if request else _ATTACH_ANSWER_S
        credit = _Credit()
        async with AsyncExitStack() as stack:
            with self._op.current():
                conversation = await stack.enter_async_context(self._ask(bus, request))
            while (part := await conversation.next(answer_s)) is not None:
                answer_s = SILENCE_S
                self._patience_until = None
                for output in self._read(part):
                    yield output
                if until_started and self.started.done():
                    return
                if (consumed := credit.due(part)) is not None:
                    await self._grant(bus, consumed)
            self.done = done = conversation.result
            for capture, offset, data in (
                (self.stdout, asked_from[0], done.stdout),
                (self.stderr, asked_from[1], done.stderr),
            ):
                for output in capture.take(offset, data):
                    yield output

    def _ask(
        self, bus: Bus, request: ExecRequest | None
    ) -> AbstractAsyncContextManager[Conversation[ExecDone]]:
        if request is not None:
            timeout_s = request.timeout_s
            return bus.converse(
                EXEC,
                request,
                budget_s=_UNBOUNDED_S if timeout_s is None else timeout_s + _MARGIN_S,
                request_id=self._op.request_id,
                limit=_PARTS_UNREAD,
                project=self._connection.project,
                node=self._node,
            )
        attach = AttachExec(
            sandbox_id=self._sandbox_id,
            exec_id=self._exec_id,
            stdout_offset=self.stdout.position,
            stderr_offset=self.stderr.position,
            max_output_bytes=MAX_OUTPUT_LIMIT,
            stream=self._stream,
        )
        return bus.converse(
            ATTACH,
            attach,
            budget_s=_UNBOUNDED_S,
            request_id=self._op.request_id,
            limit=_PARTS_UNREAD,
            project=self._connection.project,
            node=self._node,
        )

    def _read(self, part: Part) -> Iterator[Output]:
        if part.kind == KIND_STARTED and not self.started.done():
            self.started.set_result(part.decode(ExecStarted))
        elif part.kind == KIND_OUTPUT:
            capture = self.stderr if part.headers.get(_STREAM) == "2" else self.stdout
            yield from capture.take(int(part.headers.get(_OFFSET, "0")), part.data)

    async def _grant(self, bus: Bus, consumed: int) -> None:
        credit = ExecCredit(
            sandbox_id=self._sandbox_id, exec_id=self._exec_id, consumed_bytes=consumed
        )
        with suppress(Unavailable):  # the stream is broken, and attaching begins a new one
            await bus.publish(
                EXEC_CREDIT, credit, project=self._connection.project, node=self._node
            )

    def _lost(self, err: DSecError) -> DSecError:
        """What to raise if the stream cannot be continued."""
        if isinstance(err, Unavailable) and err.retry_after_s is not None:
            return named(err, self._node)
        return Unavailable(
            f"node {self._node}, command {self._exec_id}: {err.message}",
            hint="the command may be running or done; the same exec_id attaches, never runs twice",
            request_id=self._op.request_id,
        )

    def _no_record(self, cause: DSecError) -> Unavailable:
        return Unavailable(
            f"{cause.message}; and now it has no record of the command, which then never started",
            hint="run it again; under the same exec_id it can in no case run twice",
            request_id=self._op.request_id,
        )

    async def _pause(self, err: DSecError, cause: DSecError) -> None:
        """Wait before the next attempt, or raise when the node has not answered for a lease."""
        now, wait_s = time.monotonic(), err.retry_after_s or _RETRY_S
        if self._patience_until is None:
            self._patience_until = now + LEASE_S
        elif isinstance(err, DataLoss):
            raise err  # attaching did not help: what is lost is lost
        if now + wait_s > self._patience_until:
            raise cause from err
        await asyncio.sleep(wait_s)
