"""The client's finished spans on their way to the edges, which keep them for `dsec trace`.

Batched per node and sent a moment later, so that a command does not wait for its own report. They
are worth little: when the bus is away or the bound is hit they are forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from .wire.trace import ReportSpans, SpanRecord

_DELAY_S = 0.2
_PENDING = 512  # spans of all nodes; more are dropped
_BATCH = 64

Send = Callable[[str, ReportSpans], Awaitable[None]]


class SpanReport:
    """Spans by node. `flush` before the connection closes, or the last ones are lost."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: dict[str, list[SpanRecord]] = {}
        self._count = 0
        self._flushing: asyncio.Task[None] | None = None
        self.dropped = 0

    def add(self, node: str, span: SpanRecord) -> None:
        if self._count >= _PENDING:
            self.dropped += 1
            return
        self._count += 1
        self._pending.setdefault(node, []).append(span)
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush_later())

    async def flush(self) -> None:
        pending, self._pending, self._count = self._pending, {}, 0
        for node, spans in pending.items():
            for first in range(0, len(spans), _BATCH):
                await self._send(node, ReportSpans(spans=tuple(spans[first : first + _BATCH])))

    async def close(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.wait({self._flushing})
        await self.flush()

    async def _flush_later(self) -> None:
        await asyncio.sleep(_DELAY_S)
        await self.flush()
