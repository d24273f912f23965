"""A command started or attached to, for reading its output as it comes and writing to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from .model import AgentResult, OutputChunk
from .protocol import StartedFlag
from .stream import ReadingStream


class AgentProcess:
    """One attachment to a command: ``async for`` its output, ``wait`` for its end, or ``detach``.

    Unless attached with *watch*, a command whose output nobody takes blocks, as on any pipe.
    """

    def __init__(self, stream: ReadingStream) -> None:
        self._stream = stream
        self._started = stream.started.result()
        self._stdin_taken = stream.stdin.position

    @property
    def exec_id(self) -> str:
        return self._stream.exec_id

    @property
    def pid(self) -> int | None:
        return self._started.pid or None

    @property
    def started_ns(self) -> int:
        return self._started.started_ns

    @property
    def stdin_received(self) -> int:
        """Bytes of input it had taken when this attached: where a writer goes on."""
        return self._stdin_taken

    @property
    def known(self) -> bool:
        """It ran before this request, which only attached to it."""
        return StartedFlag.KNOWN in self._started.flags

    @property
    def ended(self) -> bool:
        return self._stream.over

    def __aiter__(self) -> AsyncIterator[OutputChunk]:
        return self._stream.chunks()

    async def write(self, data: bytes) -> None:
        """Returns when the agent has taken it all, which a command that does not read delays."""
        if data:
            self._stream.stdin.push(data)
            await self._stream.stdin.drained()

    def close_stdin(self) -> None:
        self._stream.stdin.close()

    async def wait(self) -> AgentResult:
        """The end, without output: what nobody has read yet is thrown away."""
        self._stream.discard()
        await asyncio.shield(self._stream.ended)  # others may wait for it too
        return self._stream.result()

    def detach(self) -> None:
        """The command goes on; its last MiB per stream is kept for whoever attaches next."""
        self._stream.detach()
