"""Several replies to one request: inboxes that can be handed out, and conversations."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from ..errors import DataLoss, DSecError
from ..wire.model import Message
from .call import Budget, Part
from .mailbox import Mailbox, ends, late, nobody_answers

Rep = TypeVar("Rep", bound=Message)


class Inbox:
    """A bounded mailbox whose address can be handed out.

    Once its bound is hit it drops what arrives until the reader has caught up and been told.

    Attributes:
        subject: what goes into a payload's `reply_to`.
        nonce: what senders must echo; messages with another one are dropped.
    """

    raw = False

    def __init__(self, mailbox: Mailbox, *, limit: int, asked: str = "", owner: str = "") -> None:
        self.asked = asked
        self._owner = owner
        self._mailbox = mailbox
        self._limit = limit
        self._dropped = 0
        self._queue: deque[Part | DSecError] = deque()
        self._arrived = asyncio.Event()
        self.nonce = mailbox.add(self)
        self.subject = mailbox.address(self.nonce)

    async def next(self, timeout_s: float = math.inf) -> Part:
        """The next message.

        Raises:
            DSecError: the message is an error reply; the inbox stays usable.
            DeadlineExceeded: nothing came within `timeout_s`.
            Unavailable: nobody listens where the request went, or the connection was lost.
            DataLoss: messages were dropped because nobody read them in time.
        """
        item = await self.take(timeout_s)
        if isinstance(item, DSecError):
            raise item
        if (err := item.error()) is not None:
            raise err
        return item

    async def take(self, timeout_s: float = math.inf) -> Part | DSecError:
        """As `next`, but an error is returned: a failure met here, or a Part with its error."""
        if not self._queue and not self._dropped:
            await self._wait(timeout_s)
        return self._queue.popleft() if self._queue else self._loss()

    async def __aiter__(self) -> AsyncIterator[Part]:
        while True:
            yield await self.next()

    def close(self) -> None:
        self._mailbox.remove(self.nonce)

    async def _wait(self, timeout_s: float) -> None:
        self._arrived.clear()
        try:
            async with asyncio.timeout(timeout_s if timeout_s < math.inf else None):
                await self._arrived.wait()
        except TimeoutError:
            raise late(self.asked or self.subject, timeout_s) from None

    def _loss(self) -> DataLoss:
        dropped, self._dropped = self._dropped, 0
        return DataLoss(f"{dropped} messages were dropped: {self._limit} were already unread")

    # --- the mailbox's side ---------------------------------------------------------------------

    def deliver(self, part: Part) -> None:
        self._put(part)

    def fail(self, err: DSecError) -> None:
        self._put(err)

    def nobody(self) -> None:
        self._put(nobody_answers(self.asked, self._owner))

    def _put(self, item: Part | DSecError) -> None:
        if self._dropped or len(self._queue) >= self._limit:
            self._dropped += 1
        else:
            self._queue.append(item)
        self._arrived.set()


class Conversation(Generic[Rep]):
    """One request's reply stream, read at the caller's pace: parts first, then `result`.

    Iterating raises what `Inbox.next` raises. The request's budget bounds the whole, `idle_s` the
    silence between two messages.
    """

    def __init__(
        self, inbox: Inbox, reply: type[Rep], *, budget: Budget, idle_s: float = math.inf
    ) -> None:
        self._inbox = inbox
        self._reply = reply
        self._budget = budget
        self._idle_s = idle_s
        self._result: Rep | None = None

    async def next(self, timeout_s: float = math.inf) -> Part | None:
        """The next part, or None when the stream has ended and `result` is there."""
        if self._result is not None:
            return None
        part = await self._inbox.next(min(timeout_s, self._idle_s, self._budget.remaining_s))
        if not ends(part):
            return part
        self._result = part.decode(self._reply)
        return None

    async def __aiter__(self) -> AsyncIterator[Part]:
        while (part := await self.next()) is not None:
            yield part

    @property
    def result(self) -> Rep:
        if self._result is None:
            raise RuntimeError("the conversation has not ended")
        return self._result
