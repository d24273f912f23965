"""Pulling messages from a JetStream consumer: as many as there are, or the next one when it comes.

The client library's own fetch waits for a whole batch until its time is over, which is latency
where one message is all there is. Every pull here ends with a known answer of the server, so no
forgotten request of ours swallows a message that another replica could have had.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Self

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from libdsec.bus import Bus
from libdsec.errors import NotFound, Unavailable
from libdsec.wire.model import random_token

_ANSWER_S = 2.0  # how long after a pull's own end the server's word for it may take
_EMPTY = frozenset({"404", "408"})  # nothing there; nothing came
_GONE = ("consumer deleted", "consumer is push based")


class Puller:
    """The receiving end of one consumer. Lifecycle: open → pull (repeatedly) → close."""

    def __init__(self, bus: Bus, stream: str, consumer: str) -> None:
        self._bus = bus
        self._what = f"consumer {consumer} of stream {stream}"
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._address = ""
        self._number = 0
        self._arrived: asyncio.Queue[Msg] = asyncio.Queue()  # bounded by what is pulled
        self._subscription: Subscription | None = None

    async def __aenter__(self) -> Self:
        self._address = f"{self._bus.nats.new_inbox()}.{random_token(4)}"
        self._subscription = await self._bus.nats.subscribe(
            f"{self._address}.*", cb=self._arrived.put
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.give_back()
        if self._subscription is not None:
            with contextlib.suppress(NatsError):  # closed: it went with the connection
                await self._subscription.unsubscribe()

    async def pull(self, limit: int, *, wait_s: float) -> list[Msg]:
        """Up to `limit` messages that are there now; if there are none, what comes in `wait_s`.

        Raises:
            Unavailable: JetStream does not answer.
            NotFound: the consumer is gone.
        """
        messages = await self._ask(limit)
        if not messages and wait_s > 0:
            messages = await self._ask(1, wait_s)
            if messages and limit > 1:
                messages += await self._ask(limit - 1)
        return messages

    async def give_back(self) -> None:
        """Let others have what has arrived and will not be looked at here."""
        while not self._arrived.empty():
            await self._refuse([self._arrived.get_nowait()])

    async def _ask(self, limit: int, wait_s: float = 0.0) -> list[Msg]:
        """One pull request, to its end."""
        self._number += 1
        reply_to = f"{self._address}.{self._number}"
        request: dict[str, object] = {"batch": limit}
        if wait_s > 0:
            request["expires"] = int(wait_s * 1e9)
        else:
            request["no_wait"] = True
        if not self._bus.ready:
            raise Unavailable("the connection to NATS is lost")
        await self._bus.nats.publish(self._next, json.dumps(request).encode(), reply=reply_to)
        messages: list[Msg] = []
        try:
            async with asyncio.timeout(wait_s + _ANSWER_S):
                while len(messages) < limit:
                    msg = await self._arrived.get()
                    status = (msg.headers or {}).get("Status") if not msg.data else None
                    if status is None:
                        messages.append(msg)  # also what an earlier, lost pull had asked for
                    elif msg.subject == reply_to and self._ends(status, msg):
                        break
        except TimeoutError as err:
            if not messages:
                raise Unavailable(f"JetStream does not answer for {self._what}") from err
        except asyncio.CancelledError:
            await self._refuse(messages)
            raise
        return messages

    async def _refuse(self, messages: list[Msg]) -> None:
        # At once instead of after ack_wait.
        for msg in messages:
            if msg.reply and self._bus.ready:
                await self._bus.nats.publish(msg.reply, b"-NAK")

    def _ends(self, status: str, msg: Msg) -> bool:
        """Whether this status message ends the pull; errors are raised."""
        text = (msg.headers or {}).get("Description", "").lower()
        if status in _EMPTY:
            return True
        if status == "100":
            return False
        if status == "503" or any(word in text for word in _GONE):
            raise NotFound(f"there is no {self._what}", hint="JetStream may be restarting")
        if status == "409" and "maxackpending" in text.replace(" ", ""):
            return True  # enough is unacknowledged already: to the caller, nothing is there
        raise Unavailable(f"{self._what}: {status} {text}")
