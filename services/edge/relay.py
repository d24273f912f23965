"""One command's output on its way to one reader: inline if it is small, else in chunks on credit.

While the reader does not consume, nothing is taken from the agent, whose ring and then the
command's own pipe fill up: the command waits, and nobody's memory grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from libdsec.bus import Call
from libdsec.wire import defaults as d
from libdsec.wire.envelope import H_OFFSET, H_STREAM
from libdsec.wire.execution import KIND_OUTPUT, KIND_PROGRESS, ExecProgress

from .agent.model import OutputChunk
from .agent.protocol import OutputStream
from .command import Window


class Output(Protocol):
    """What is read from: the agent channel's AgentProcess."""

    def __aiter__(self) -> AsyncIterator[OutputChunk]: ...


class Relay:
    """made per reply stream -> (begin) -> run, again after a broken channel -> output or lacks."""

    def __init__(self, call: Call, exec_id: str, *, stream: bool, window: Window) -> None:
        self._call = call
        self._exec_id = exec_id
        self._streaming = stream
        self._window = window
        self._kept: list[OutputChunk] = []
        self._kept_bytes = 0
        self._limit_bytes = d.MAX_OUTPUT_LIMIT
        self._first = dict.fromkeys(OutputStream, 0)  # where reading began
        self._offsets = dict.fromkeys(OutputStream, 0)  # up to here it was read
        self._lacking = dict.fromkeys(OutputStream, 0)  # bytes that were not passed on

    def begin(self, stdout_offset: int, stderr_offset: int, *, limit_bytes: int) -> None:
        """Read from here on, and pass on at most `limit_bytes` of each stream."""
        self._first = {OutputStream.STDOUT: stdout_offset, OutputStream.STDERR: stderr_offset}
        self._offsets = dict(self._first)
        self._limit_bytes = limit_bytes

    @property
    def inline(self) -> bool:
        """Nothing was sent: the result carries the output."""
        return not self._streaming

    @property
    def stdout_offset(self) -> int:
        return self._offsets[OutputStream.STDOUT]

    @property
    def stderr_offset(self) -> int:
        return self._offsets[OutputStream.STDERR]

    def output(self, which: OutputStream) -> bytes:
        return b"".join(chunk.data for chunk in self._kept if chunk.stream is which)

    def lacks(self, stdout_total: int, stderr_total: int) -> bool:
        """Whether the command wrote anything, from where reading began, that was not passed on."""
        unread = stdout_total > self.stdout_offset or stderr_total > self.stderr_offset
        return unread or any(self._lacking.values())

    async def run(self, output: Output) -> None:
        """To the end of the output, or until the channel breaks; then `run` again from there."""
        async for chunk in output:
            passed = self._account(chunk)
            if passed is None:
                continue
            if self._streaming:
                await self._send(passed)
                continue
            self._kept.append(passed)
            self._kept_bytes += len(passed.data)
            if self._kept_bytes > d.INLINE_BYTES:
                await self._overflow()

    def _account(self, chunk: OutputChunk) -> OutputChunk | None:
        """What of a chunk is within the limit; a gap before it was lost in the agent's ring."""
        which, end = chunk.stream, chunk.offset + len(chunk.data)
        self._lacking[which] += max(0, chunk.offset - self._offsets[which])
        self._offsets[which] = end
        room = self._limit_bytes - (chunk.offset - self._first[which])
        if room >= len(chunk.data):
            return chunk
        self._lacking[which] += len(chunk.data) - max(0, room)
        return OutputChunk(which, chunk.offset, chunk.data[:room]) if room > 0 else None

    async def _overflow(self) -> None:
        """Too much for one message: what was kept goes ahead, the rest follows as it comes."""
        kept, self._kept = self._kept, []
        self._streaming = True
        for chunk in kept:
            await self._send(chunk)

    async def _send(self, chunk: OutputChunk) -> None:
        for begin in range(0, len(chunk.data), d.CHUNK_BYTES):
            piece = chunk.data[begin : begin + d.CHUNK_BYTES]
            await self._window.reserve(len(piece))
            headers = {H_STREAM: str(int(chunk.stream)), H_OFFSET: str(chunk.offset + begin)}
            await self._call.send(KIND_OUTPUT, piece, headers)


class Progress:
    """Says that a command still runs whenever nothing else was said for EXEC_PROGRESS_S."""

    def __init__(self, call: Call, relay: Relay, exec_id: str, now: Callable[[], float]) -> None:
        self._call = call
        self._relay = relay
        self._exec_id = exec_id
        self._now = now
        self._began = now()
        self._said = (0, 0)
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(d.EXEC_PROGRESS_S, self._start)

    def close(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        """Most commands end before this: they never pay for a task."""
        self._task = asyncio.get_running_loop().create_task(self._talk())

    async def _talk(self) -> None:
        while True:
            read = self._relay.stdout_offset, self._relay.stderr_offset
            if read == self._said or self._relay.inline:
                await self._call.send(
                    KIND_PROGRESS,
                    ExecProgress(
                        exec_id=self._exec_id,
                        running_s=self._now() - self._began,
                        stdout_total=read[0],
                        stderr_total=read[1],
                    ),
                )
            self._said = read
            await asyncio.sleep(d.EXEC_PROGRESS_S)
