"""Where replies arrive: one wildcard subscription per connection, told apart by unguessable tokens.

Every waiting request and every inbox is an entry in one table, so that waiting costs no SUB and no
UNSUB, and a lost connection or a refused publish reaches exactly those who wait for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Protocol

from nats.aio.msg import Msg

from ..errors import DeadlineExceeded, DSecError, Unavailable
from .call import KIND, NONCE, Part, lowered
from .link import Denial, Link

_STATUS = "status"  # the client library's name for the status line of a server's own message
_NO_RESPONDERS = "503"

# Parts of these kinds end a reply stream; a plain reply has no kind at all.
_ENDS = frozenset({"", "result"})


def ends(part: Part) -> bool:
    return part.kind in _ENDS


class NobodyListens(Unavailable):
    """The request has reached nobody: it was certainly not carried out."""


def nobody_answers(subject: str, owner: str) -> NobodyListens:
    return NobodyListens(
        f"nobody answers on {subject}: {owner} is not there",
        hint="it may be starting, stopped, or cut off from NATS",
        retry_after_s=1.0,
    )


def late(subject: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"no reply on {subject} within {timeout_s:.3g} s")


class Waiter(Protocol):
    """Someone a message may arrive for.

    Attributes:
        asked: the subject of what it is a reply to.
        raw: the NATS server itself replies: with no nonce, and with whatever headers it has stored.
    """

    asked: str
    raw: bool

    def deliver(self, part: Part) -> None: ...

    def fail(self, err: DSecError) -> None: ...

    def nobody(self) -> None:
        """The server says that nobody listens on `asked`."""


class Mailbox:
    """The table of those who wait."""

    def __init__(self, link: Link, inbox_prefix: str) -> None:
        self._link = link
        self._prefix = f"{inbox_prefix}.{os.urandom(8).hex()}."
        self._waiting: dict[str, Waiter] = {}
        link.on_lost.append(self._lost)
        link.on_denied.append(self._denied)

    async def open(self) -> None:
        await self._link.subscribe(self._prefix + "*", self._on_message)

    def add(self, waiter: Waiter) -> str:
        """A token that stands for `waiter` until `remove`; it is the request's nonce as well."""
        token = os.urandom(8).hex()
        self._waiting[token] = waiter
        return token

    def address(self, token: str) -> str:
        return self._prefix + token

    def remove(self, token: str) -> None:
        self._waiting.pop(token, None)

    def __len__(self) -> int:
        return len(self._waiting)

    async def _on_message(self, msg: Msg) -> None:
        token = msg.subject[len(self._prefix) :]
        waiter = self._waiting.get(token)
        if waiter is None:
            return  # late: whoever waited has gone
        headers = lowered(msg.headers)
        if headers.get(_STATUS) == _NO_RESPONDERS and not msg.data:
            waiter.nobody()
        elif waiter.raw or headers.get(NONCE) == token:
            waiter.deliver(Part(headers.get(KIND, ""), msg.data, headers))
        else:
            self._link.observer.dropped("reply", "nonce")

    def _lost(self, how: str) -> None:
        for waiter in tuple(self._waiting.values()):
            waiter.fail(
                Unavailable(
                    f"{how} for a reply; the request may have been carried out",
                    hint="repeat it with the same id or key",
                )
            )

    def _denied(self, denial: Denial) -> None:
        if denial.operation != "publish":
            return
        for waiter in tuple(self._waiting.values()):
            if waiter.asked.lower() == denial.subject:
                waiter.fail(denial.error())


class Reply:
    """Waits for the one reply that ends a request, passing the parts before it on."""

    __slots__ = ("_future", "_idle", "_idle_s", "_loop", "_on_part", "_owner", "asked", "raw")

    def __init__(
        self,
        asked: str,
        owner: str,
        *,
        on_part: Callable[[Part], None] | None = None,
        idle_s: float | None = None,
        raw: bool = False,
    ) -> None:
        self.asked = asked
        self.raw = raw
        self._owner = owner
        self._on_part = on_part
        self._idle_s = idle_s
        self._idle: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Part] = self._loop.create_future()

    def deliver(self, part: Part) -> None:
        if self._future.done():
            return
        if ends(part):
            self._future.set_result(part)
            return
        self._restart_idle()
        if self._on_part is not None:
            try:
                self._on_part(part)
            except Exception as err:  # the caller's own code: its error becomes the request's
                self._future.set_exception(err)

    def fail(self, err: DSecError) -> None:
        if not self._future.done():
            self._future.set_exception(err)

    def nobody(self) -> None:
        self.fail(nobody_answers(self.asked, self._owner))

    async def wait(self, timeout_s: float) -> Part:
        """The last part. A bare timer instead of `wait_for`: this is the hot path."""
        total = self._loop.call_later(timeout_s, self._expire, timeout_s)
        self._restart_idle()
        try:
            return await self._future
        finally:
            total.cancel()
            if self._idle is not None:
                self._idle.cancel()

    def abandon(self) -> None:
        """Nobody will wait any more; an error that arrived meanwhile counts as seen."""
        if not self._future.cancel() and not self._future.cancelled():
            self._future.exception()

    def _expire(self, timeout_s: float) -> None:
        self.fail(late(self.asked, timeout_s))

    def _restart_idle(self) -> None:
        if self._idle_s is not None:
            if self._idle is not None:
                self._idle.cancel()
            self._idle = self._loop.call_later(self._idle_s, self._fell_silent)

    def _fell_silent(self) -> None:
        self.fail(
            Unavailable(
                f"{self._owner} has said nothing on {self.asked} for {self._idle_s:g} s",
                hint="it may still be at work: ask again with the same id",
            )
        )
