"""One message out of a stream, and the one table of what becomes of it.

handler ends with                                     outcome
nothing raised                                        acknowledged, and confirmed by the server
retryable DSecError (unavailable, quota, capacity)    delivered again after a back-off
any other DSecError; a message that cannot be read    dead letter
anything else: a bug                                  again, and a dead letter at the last try
cancellation                                          neither: whoever is next gets it in time
a budget that has run out before or meanwhile         dropped: nobody waits for it any more
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Generic, TypeVar

from nats.aio.msg import Msg

from libdsec.bus import Bus, Call
from libdsec.errors import DSecError, Internal
from libdsec.wire.envelope import Durable
from libdsec.wire.model import Message

from .clock import Clock
from .dead_letter import bury

M = TypeVar("M", bound=Message)

BUG_DELIVERIES = 5  # where the durable itself sets no limit
_ACK_BUDGET_S = 5.0


class Outcome(StrEnum):
    """What becomes of a delivered message; also the label of its metric."""

    DONE = "done"
    RETRY = "retry"
    DEAD = "dead"
    EXPIRED = "expired"
    LEFT = "left"


class Retry(Exception):  # an instruction, not a failure
    """Raised by a handler that wants the message again, after `delay_s` or the usual back-off."""

    def __init__(self, reason: str, *, delay_s: float | None = None) -> None:
        super().__init__(reason)
        self.delay_s = delay_s


def outcome_of(err: BaseException | None, *, expired: bool, last_try: bool) -> Outcome:
    """The table."""
    if err is None:
        return Outcome.DONE
    if isinstance(err, asyncio.CancelledError):
        return Outcome.LEFT
    if expired:
        return Outcome.EXPIRED
    if isinstance(err, Retry) or (isinstance(err, DSecError) and err.retryable):
        return Outcome.RETRY
    if isinstance(err, DSecError) and not isinstance(err, Internal):
        return Outcome.DEAD
    return Outcome.DEAD if last_try else Outcome.RETRY


def backoff_s(durable: Durable, attempt: int) -> float:
    """The durable's delay for this attempt, spread so that what failed together returns apart."""
    step = durable.backoff_s[min(attempt, len(durable.backoff_s)) - 1]
    return step * random.uniform(0.75, 1.25)


class Delivery(Generic[M]):
    """A message being worked on. Lifecycle: pulled → held → exactly one of ack, retry, discard.

    Attributes:
        message: the payload.
        call: project, request id, remaining budget and headers, as a request's handler has them.
        attempt: how often it has been delivered, this time included.
        seq: its place in the stream.
        age_s: how long ago the server stored it, by the server's clock.
    """

    def __init__(
        self,
        bus: Bus,
        durable: Durable,
        msg: Msg,
        message: M,
        call: Call,
        age_s: float,
        clock: Clock,
    ) -> None:
        metadata = msg.metadata
        self.message = message
        self.call = call
        self.attempt = metadata.num_delivered
        self.seq = metadata.sequence.stream
        self.age_s = age_s
        self.settled = False
        self._bus = bus
        self._durable = durable
        self._msg = msg
        self._clock = clock

    @property
    def subject(self) -> str:
        return self._msg.subject

    @property
    def last_try(self) -> bool:
        limit = self._durable.max_deliver
        return self.attempt >= (limit if limit > 0 else BUG_DELIVERIES)

    async def ack(self) -> None:
        """Done with it; returns when the server knows.

        Raises:
            Unavailable, DeadlineExceeded: it does not know, and will deliver it again.
        """
        self.settled = True
        await self._bus.ask_server(self._msg.reply, b"+ACK", budget_s=_ACK_BUDGET_S)

    async def retry(self, delay_s: float | None = None) -> None:
        """Give it back, to be delivered again after `delay_s` (default: the durable's back-off)."""
        delay_s = backoff_s(self._durable, self.attempt) if delay_s is None else delay_s
        self.settled = True
        await self._say(b"-NAK " + json.dumps({"delay": int(delay_s * 1e9)}).encode())

    async def discard(self, reason: str) -> None:
        """Make it a dead letter, which `dsec dlq` shows and can replay.

        Raises:
            DSecError: the dead letter could not be stored; the message stays what it was.
        """
        await bury(self._bus, self._durable.stream.name, self._msg, reason, clock=self._clock)
        await self.drop()

    async def drop(self) -> None:
        """Never deliver it again, and keep nothing of it."""
        self.settled = True
        await self._say(b"+TERM")

    async def progress(self) -> None:
        """It is still being worked on: its ack_wait begins anew."""
        await self._say(b"+WPI")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keep it ours while the block runs, however long."""
        beat = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beat.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._durable.ack_wait_s / 2)
            await self.progress()

    async def _say(self, word: bytes) -> None:
        # Lost with the connection, the message comes again after ack_wait: nothing to wait for.
        if self._bus.ready:
            await self._bus.nats.publish(self._msg.reply, word)
