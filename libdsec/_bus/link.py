"""One connection to NATS: how it begins, what may happen to it, how it ends.

Once made it reconnects for ever; only `close`, or the server throwing this principal out, ends it.
Nothing is published while it is down: the client library would buffer silently and send late what
its caller has given up on, so everyone waits here for the connection instead, within their budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, ConnectionDrainingError, SlowConsumerError
from nats.errors import Error as NatsError

from ..errors import DSecError, PermissionDenied, Unavailable
from .call import Budget

_log = logging.getLogger("libdsec.bus")

_PING_INTERVAL_S = 10  # with two outstanding pings a dead peer is noticed within 30 s
_RECONNECT_WAIT_S = 0.5
_CONNECT_ATTEMPT_S = 2
_LAME_DUCK_GRACE_S = 5.0
_SUBSCRIBE_S = 5.0

# The server lower-cases nothing, the client library everything: compare subjects lower-cased.
_DENIAL = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.I)
_USERINFO = re.compile(r"//[^/@]*@")  # an address may carry a password, a message must not
_DOWN_HINT = "is the server at {servers} running and reachable?"


class BusObserver:
    """What a process may want to count. Every method does nothing; all run on the event loop."""

    def connected(self) -> None:
        """The connection is there, for the first time or again."""

    def disconnected(self) -> None:
        """The connection is lost; the bus reconnects by itself."""

    def closed(self) -> None:
        """The connection is gone for good."""

    def lame_duck(self) -> None:
        """The server announced that it is about to stop."""

    def sent(self, template: str, outcome: str, duration_s: float) -> None:
        """A request was answered (`ok`) or failed (the error's code)."""

    def handled(self, template: str, outcome: str, duration_s: float) -> None:
        """A handler ended."""

    def dropped(self, template: str, reason: str) -> None:
        """A message was thrown away; `reason` is one of a few fixed words."""

    def slow_consumer(self, subject: str) -> None:
        """The client library dropped a message because its queue was full."""

    def denied(self, operation: str, subject: str) -> None:
        """The server refused a publish or a subscription."""


@dataclass(frozen=True, slots=True)
class Denial:
    """The server's word, which comes asynchronously, that something was not permitted."""

    operation: str  # publish | subscription
    subject: str  # lower-cased
    number: int

    def error(self) -> PermissionDenied:
        verb = "publish to" if self.operation == "publish" else "subscribe to"
        return PermissionDenied(
            f"these credentials may not {verb} {self.subject}",
            hint="project and node in it must be the credentials' own; `ops` takes an operator's",
        )


@dataclass(frozen=True)
class Credentials:
    """How this process proves who it is; all None where the server asks for nothing."""

    user: str | None = None
    password: str | None = None
    file: Path | None = None
    tls: ssl.SSLContext | None = None

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"user": self.user, "password": self.password, "tls": self.tls}
        if self.file is not None:
            options["user_credentials"] = str(self.file)
        return options


class Link:
    """The connection. `on_lost` and `on_denied` tell whoever waits for a reply."""

    def __init__(self, observer: BusObserver) -> None:
        self.nats = Client()
        self.observer = observer
        self.on_lost: list[Callable[[str], None]] = []
        self.on_denied: list[Callable[[Denial], None]] = []
        self._servers = ""  # for messages
        self._up = asyncio.Event()
        self._closed = asyncio.Event()
        self._denials: deque[Denial] = deque(maxlen=64)
        self._denial_count = 0
        self._refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._background: set[asyncio.Task[None]] = set()
        self._leaving: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self.nats.is_connected and not self.nats.is_draining

    async def open(
        self,
        servers: Sequence[str],
        name: str,
        credentials: Credentials,
        inbox_prefix: str,
        timeout_s: float,
    ) -> None:
        """Connect for the first time.

        Raises:
            Unavailable: no server answered within `timeout_s`.
            PermissionDenied: a server refused the credentials.
        """
        self._servers = ", ".join(_USERINFO.sub("//", server) for server in servers)
        connecting = asyncio.ensure_future(
            self.nats.connect(
                servers=list(servers),
                name=name,
                inbox_prefix=inbox_prefix,
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # floats work
                connect_timeout=_CONNECT_ATTEMPT_S,
                ping_interval=_PING_INTERVAL_S,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                lame_duck_mode_cb=self._on_lame_duck,
                **credentials.options(),
            )
        )
        # With max_reconnect_attempts=-1 the library tries for ever, a refusal included.
        either: set[asyncio.Future[Any]] = {connecting, self._refused}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not (connecting.done() and connecting.exception() is None):
            await self._abandon(connecting)
            raise self._why_not(timeout_s)
        self._up.set()
        self.observer.connected()

    async def _abandon(self, connecting: asyncio.Future[None]) -> None:
        await _cancel_for_good(connecting)
        await self.close()

    def _why_not(self, timeout_s: float) -> DSecError:
        if self._refused.done():
            return PermissionDenied(
                f"NATS at {self._servers} refused the credentials: {self._refused.result()}",
                hint="check user and password, or the credentials file",
            )
        cause = self.nats.last_error
        return Unavailable(
            f"no NATS server answered within {timeout_s:g} s" + (f": {cause}" if cause else ""),
            hint=_DOWN_HINT.format(servers=self._servers),
        )

    async def usable(self, budget: Budget) -> None:
        """Wait for the connection.

        Raises:
            Unavailable: it did not come back within the budget, or is closed.
        """
        if self._up.is_set():
            return
        if not (self._closed.is_set() or budget.expired):
            try:
                async with asyncio.timeout(budget.remaining_s):
                    await self._up.wait()
                return
            except TimeoutError:
                pass
        state = "is closed" if self._closed.is_set() else "is lost and has not come back in time"
        raise Unavailable(
            f"the connection to NATS {state}",
            hint=_DOWN_HINT.format(servers=self._servers),
        )

    async def publish(
        self, subject: str, data: bytes, headers: dict[str, str], reply: str = ""
    ) -> None:
        """Hand one message to the socket's buffer.

        Raises:
            nats.errors.MaxPayloadError: larger than the server takes.
            Unavailable: the connection is closing.
        """
        try:
            await self.nats.publish(subject, data, reply=reply, headers=headers or None)
        except (ConnectionClosedError, ConnectionDrainingError) as err:
            raise Unavailable("the connection to NATS is closing") from err

    async def subscribe(
        self, subject: str, callback: Callable[[Msg], Awaitable[None]], *, queue: str = ""
    ) -> Subscription:
        """Subscribe, and know that the server has agreed to it.

        Raises:
            PermissionDenied: these credentials may not subscribe there.
        """
        mark = self._denial_count
        subscription = await self.nats.subscribe(subject, queue=queue, cb=callback)
        await self.round_trip(_SUBSCRIBE_S)
        denial = self.denied_since(mark, "subscription", subject)
        if denial is not None:
            await subscription.unsubscribe()  # or it would be asked for again at each reconnect
            raise denial.error()
        return subscription

    async def round_trip(self, timeout_s: float) -> None:
        """Return when the server has processed everything sent so far.

        Raises:
            Unavailable: it did not answer in time.
        """
        if not await self.to_the_end(self._flush(), timeout_s):
            raise Unavailable(f"NATS did not answer a ping within {timeout_s:g} s")

    async def unsubscribe(self, subscription: Subscription, timeout_s: float) -> None:
        """Take nothing more, and lose nothing that was on its way: what has come is called back."""
        if self.ready:
            await self.to_the_end(self._unsubscribe(subscription), timeout_s)
        else:  # nothing can come, and the next connection must not ask for it again
            with contextlib.suppress(NatsError):
                await subscription.unsubscribe()

    async def _unsubscribe(self, subscription: Subscription) -> None:
        await self.nats._send_unsubscribe(subscription._id)
        await self._flush()
        await subscription.drain()  # type: ignore[no-untyped-call]

    async def _flush(self) -> None:
        """A round trip behind all that was sent: the library's own ping overtakes its buffer, so
        that its drain lets go of a subscription before the server does."""
        await self.nats._flush_pending(force_flush=True)
        await self.nats.flush(timeout=60)

    async def to_the_end(self, step: Coroutine[Any, Any, None], timeout_s: float) -> bool:
        """Wait for a step that flushes, without ever cancelling it; False if it did not succeed.

        A cancelled flush leaves a cancelled future in the library's list of pings, and its read
        loop dies on the pong that belongs to it.
        """
        task = asyncio.create_task(step)
        self._keep(task)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        return bool(done) and not task.cancelled() and task.exception() is None

    def denial_mark(self) -> int:
        """Where the list of denials stands; see `denied_since`."""
        return self._denial_count

    def denied_since(self, mark: int, operation: str, subject: str) -> Denial | None:
        wanted = subject.lower()
        for denial in self._denials:
            if denial.number > mark and (denial.operation, denial.subject) == (operation, wanted):
                return denial
        return None

    async def drain(self, timeout_s: float) -> None:
        """Flush and close, whatever state the connection is in."""
        # Without a connection the library's drain refuses: there is nobody to flush to.
        if not await self.to_the_end(self.nats.drain(), timeout_s):
            await self.close()

    async def close(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        await self.nats.close()
        reconnecting = self.nats._reconnection_task
        if reconnecting is not None:
            await _cancel_for_good(reconnecting)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._background.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever waited for it has been told

    # --- what the library tells us; each must return quickly and never raise ------------------

    async def _on_error(self, err: Exception) -> None:
        text = str(err)
        if isinstance(err, SlowConsumerError):
            _log.warning("slow consumer on %s: a message was dropped", err.subject)
            self.observer.slow_consumer(err.subject)
        elif match := _DENIAL.search(text):
            self._deny(match[1].lower(), match[2].lower())
        elif "authorization violation" in text.lower():
            _log.warning("NATS refused the credentials")
            if not self._refused.done():
                self._refused.set_result(text)
        else:
            _log.debug("connection to NATS: %r", err)

    def _deny(self, operation: str, subject: str) -> None:
        self._denial_count += 1
        denial = Denial(operation, subject, self._denial_count)
        self._denials.append(denial)
        _log.warning("the server refused a %s: %s", operation, subject)
        self.observer.denied(operation, subject)
        for tell in self.on_denied:
            tell(denial)

    async def _on_disconnected(self) -> None:
        if self._up.is_set():
            self._up.clear()
            self._lose("was lost")
            self.observer.disconnected()

    def _lose(self, how: str) -> None:
        for tell in self.on_lost:
            tell(f"the connection to NATS {how} while waiting")

    async def _on_reconnected(self) -> None:
        self._up.set()
        self.observer.connected()

    async def _on_closed(self) -> None:
        self._up.clear()
        self._closed.set()
        self._lose("was closed")
        self.observer.closed()

    async def _on_lame_duck(self) -> None:
        self.observer.lame_duck()
        if len(self.nats.servers) > 1:
            self._leaving = asyncio.create_task(self._leave_lame_duck())
            self._keep(self._leaving)

    async def _leave_lame_duck(self) -> None:
        """Move to another server before this one throws us out, after a pause for replies."""
        await asyncio.sleep(_LAME_DUCK_GRACE_S)
        await self.nats.force_reconnect()


async def _cancel_for_good(task: asyncio.Future[None]) -> None:
    """Cancel until it has ended.

    The library connects under `wait_for`, which before Python 3.12 loses a cancellation that comes
    together with a refused connection; its loops would then go on trying, on a closed client.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)
