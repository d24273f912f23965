"""A bus without a server: the real `Bus`, on a link that stays inside this process.

Only the connection is replaced, so everything a client or a service does with a bus behaves as it
does over NATS: wildcards, queue groups, "nobody listens", lost connections, refused publishes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import MaxPayloadError

from libdsec._bus.link import BusObserver, Denial, Link
from libdsec._bus.mailbox import Mailbox
from libdsec.bus import Bus
from libdsec.wire.subjects import PLACEMENTS

MAX_PAYLOAD = 1 << 20


def matches(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


@dataclass(eq=False)
class MemorySubscription:
    subject: str
    queue: str
    callback: Callable[[Msg], Awaitable[None]]
    link: MemoryLink
    waiting: asyncio.Queue[Msg] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        while True:
            await self.callback(await self.waiting.get())

    async def drain(self) -> None:
        if self in self.link.server.subscriptions:  # else it was left before
            self.link.server.subscriptions.remove(self)
        while not self.waiting.empty():
            await self.callback(self.waiting.get_nowait())
        if self.task is not None:
            self.task.cancel()

    unsubscribe = drain


class MemoryServer:
    """What the links share. `streams` are the patterns that a stream keeps and acknowledges."""

    def __init__(self) -> None:
        self.subscriptions: list[MemorySubscription] = []
        self.links: list[MemoryLink] = []
        self.streams: tuple[str, ...] = PLACEMENTS.subjects
        self.stream_error: dict[str, object] | None = None
        self.denied: tuple[str, ...] = ()
        self.published: list[tuple[str, dict[str, str], bytes]] = []
        self.seen: set[str] = set()
        self.seq = 0

    def publish(self, sender: MemoryLink, msg: Msg) -> None:
        if any(matches(pattern, msg.subject) for pattern in self.denied):
            sender.deny(msg.subject)
            return
        headers = dict(msg.headers or {})
        self.published.append((msg.subject, headers, msg.data))
        heard = self._deliver(msg)
        if any(matches(pattern, msg.subject) for pattern in self.streams):
            self._acknowledge(msg, headers)
        elif not heard and msg.reply:
            self._deliver(self._msg(msg.reply, b"", {"Status": "503"}))

    def cut(self) -> None:
        """Every link loses its connection."""
        for link in self.links:
            link.lose()

    def restore(self) -> None:
        for link in self.links:
            link.restore()

    def _acknowledge(self, msg: Msg, headers: dict[str, str]) -> None:
        if self.stream_error is not None:
            answer: dict[str, object] = {"error": self.stream_error}
        else:
            msg_id = headers.get("Nats-Msg-Id", "")
            duplicate = msg_id in self.seen
            self.seen.add(msg_id)
            self.seq += 1
            answer = {"stream": "MEMORY", "seq": self.seq, "duplicate": duplicate}
        self._deliver(self._msg(msg.reply, json.dumps(answer).encode(), {}))

    def _deliver(self, msg: Msg) -> bool:
        reached, groups = False, set()
        for subscription in list(self.subscriptions):
            if not matches(subscription.subject, msg.subject) or not subscription.link.ready:
                continue
            reached = True
            if subscription.queue:
                if (subscription.subject, subscription.queue) in groups:
                    continue
                groups.add((subscription.subject, subscription.queue))
            subscription.waiting.put_nowait(msg)
        return reached

    def _msg(self, subject: str, data: bytes, headers: dict[str, str]) -> Msg:
        return Msg(_client=Client(), subject=subject, data=data, headers=headers or None)


class MemoryLink(Link):
    """A `Link` to a MemoryServer."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(BusObserver())
        self.server = server
        self._own: list[MemorySubscription] = []
        server.links.append(self)
        self._up.set()

    @property
    def ready(self) -> bool:
        return self._up.is_set()

    async def publish(
        self, subject: str, data: bytes, headers: dict[str, str], reply: str = ""
    ) -> None:
        if len(data) > MAX_PAYLOAD:
            raise MaxPayloadError
        if self.ready:  # what is sent into a broken connection is gone
            msg = Msg(
                _client=self.nats, subject=subject, reply=reply, data=data, headers=dict(headers)
            )
            self.server.publish(self, msg)

    async def subscribe(
        self, subject: str, callback: Callable[[Msg], Awaitable[None]], *, queue: str = ""
    ) -> Any:
        subscription = MemorySubscription(subject, queue, callback, self)
        subscription.task = asyncio.create_task(subscription.run())
        self._own.append(subscription)
        self.server.subscriptions.append(subscription)
        return subscription

    async def unsubscribe(self, subscription: Any, timeout_s: float) -> None:
        await subscription.drain()

    async def round_trip(self, timeout_s: float) -> None:
        await asyncio.sleep(0)

    async def drain(self, timeout_s: float) -> None:
        await self.close()

    async def close(self) -> None:
        self._up.clear()
        self._closed.set()
        self._lose("was closed")
        for subscription in self._own:
            if subscription in self.server.subscriptions:
                await subscription.drain()
        if self in self.server.links:
            self.server.links.remove(self)

    def lose(self) -> None:
        self._up.clear()
        self._lose("was lost")

    def restore(self) -> None:
        if not self._closed.is_set():
            self._up.set()

    def deny(self, subject: str) -> None:
        self._denial_count += 1
        denial = Denial("publish", subject.lower(), self._denial_count)
        self._denials.append(denial)
        for tell in self.on_denied:
            tell(denial)


async def memory_bus(server: MemoryServer, name: str, inbox_prefix: str = "_INBOX") -> Bus:
    link = MemoryLink(server)
    mailbox = Mailbox(link, inbox_prefix)
    await mailbox.open()
    return Bus(link, mailbox, name)
