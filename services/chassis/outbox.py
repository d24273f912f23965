"""Facts on their way to a stream: batched, acknowledged, kept through outages, bounded.

What must survive the process is in the owner's journal; this holds what has not been acknowledged
yet. Records are numbered without gaps. Over its capacity the oldest that is not already being sent
is dropped and counted, and the numbers show the gap to whoever reads the stream. A batch whose
acknowledgement got lost is sent again under the same id, so the stream stores it once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, Unpack

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from libdsec.bus import Bus, Tokens
from libdsec.errors import DeadlineExceeded, DSecError, QuotaExceeded, Unavailable
from libdsec.wire.envelope import Event
from libdsec.wire.model import Message

R = TypeVar("R")
M = TypeVar("M", bound=Message)

_log = logging.getLogger("dsec.outbox")

_PASSING = (Unavailable, QuotaExceeded, DeadlineExceeded)
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0


class Outbox(Generic[R, M]):
    """Lifecycle: put (any time) while `run` runs → flush.

    Args:
        pack: makes a message of the number of its first record and the records.
        session: tells this process's numbering from its predecessor's.
        on_acked: told the number of the last record that is safe.
        to: tokens of the event's subject.
    """

    def __init__(
        self,
        bus: Bus,
        event: Event[M],
        pack: Callable[[int, Sequence[R]], M],
        *,
        session: str,
        capacity: int = 10_000,
        batch: int = 256,
        linger_s: float = 0.05,
        on_acked: Callable[[int], None] = lambda number: None,
        on_drop: Callable[[int], None] = lambda count: None,
        **to: Unpack[Tokens],
    ) -> None:
        self._bus = bus
        self._event = event
        self._pack = pack
        self._session = session
        self._capacity = capacity
        self._batch = batch
        self._linger_s = linger_s
        self._on_acked = on_acked
        self._on_drop = on_drop
        self._to = to
        self._waiting: deque[tuple[int, R]] = deque()
        self._sending = 0
        self._number = 0
        self._arrived = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self.dropped = 0

    @property
    def pending(self) -> int:
        """Records not yet acknowledged."""
        return len(self._waiting) + self._sending

    def put(self, record: R) -> int:
        """Never waits, never fails; returns the record's number."""
        if len(self._waiting) >= self._capacity:
            self._waiting.popleft()
            self._drop(1)
        number = self._number
        self._number += 1
        self._waiting.append((number, record))
        self._arrived.set()
        self._empty.clear()
        return number

    async def run(self) -> None:
        """Send for as long as the process runs."""
        while True:
            await self._arrived.wait()
            await asyncio.sleep(self._linger_s)  # what happens together travels together
            while self._waiting:
                await self._send(self._take())
            self._arrived.clear()
            self._empty.set()

    async def flush(self, timeout_s: float) -> int:
        """Wait until everything is acknowledged; returns how many records are not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            _log.warning("%d records were not acknowledged in time", self.pending)
        return self.pending

    def _take(self) -> list[tuple[int, R]]:
        """The next records without a gap between their numbers."""
        taken = [self._waiting.popleft()]
        while (
            self._waiting and len(taken) < self._batch and self._waiting[0][0] == taken[-1][0] + 1
        ):
            taken.append(self._waiting.popleft())
        self._sending = len(taken)
        return taken

    async def _send(self, records: list[tuple[int, R]]) -> None:
        first, last = records[0][0], records[-1][0]
        message = self._pack(first, [record for _, record in records])
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_PASSING),
            wait=wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    await self._bus.stream_publish(
                        self._event, message, msg_id=f"{self._session}.{first}", **self._to
                    )
        except DSecError as err:
            _log.error("records %d to %d cannot be published: %s", first, last, err)
            self._drop(len(records))
        else:
            self._on_acked(last)
        finally:
            self._sending = 0

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._on_drop(count)
