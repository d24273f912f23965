"""The bus: typed requests, events and streams over one NATS connection.

Used by the client and by every service. It owns delivery, budgets, trace context and the
translation between errors and error replies; it knows nothing of sandboxes. A second connection,
for bulk data that must not queue in front of commands, is simply another `Bus`.

Invariants: every wait is bounded by a budget; nothing is sent late (while disconnected a caller
waits, nothing is buffered); an error reply becomes the exception it stands for; a request made
inside a handler belongs to that handler's request and never outlives its budget.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self, TypeVar, Unpack

from nats.aio.client import Client

from ._bus.call import Budget, Call, Headers, Part, Tokens, current_call, leave_call
from ._bus.gather import Gathered, gather
from ._bus.inbox import Conversation, Inbox
from ._bus.incoming import Incoming, Reception
from ._bus.jetstream import H_MSG_ID, H_TTL, PubAck, refusal, ttl_header
from ._bus.link import BusObserver, Credentials, Link
from ._bus.mailbox import Mailbox, NobodyListens, Reply
from ._bus.outgoing import Outgoing, asking, exchange, fire, inbox_subject
from ._bus.serving import Endpoint, Serving, complaint
from .errors import DSecError
from .wire.envelope import H_BUDGET_MS, H_ERROR, H_FROM, H_KIND, H_NONCE, Event, Rpc, StreamingRpc
from .wire.error import ErrorReply
from .wire.model import Message

__all__ = [
    "Budget", "Bus", "BusObserver", "Call", "Conversation", "Gathered", "Inbox", "Incoming",
    "NobodyListens", "Part", "PubAck", "Reception", "Serving", "Tokens", "complaint",
    "current_call", "leave_call", "refusal", "ttl_header",
]  # fmt: skip

Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)
Msg = TypeVar("Msg", bound=Message)
AnyRpc = Rpc[Req, Rep] | StreamingRpc[Req, Rep]

EVENT_BUDGET_S = 60.0


class Bus:
    """One connection, typed by the contracts in `libdsec.wire`. Lifecycle: connect, use, drain."""

    def __init__(self, link: Link, mailbox: Mailbox, identity: str) -> None:
        self._link = link
        self._mailbox = mailbox
        self._identity = identity
        self.servings: list[Serving] = []

    @classmethod
    async def connect(
        cls,
        servers: Sequence[str],
        *,
        name: str,
        identity: str = "",
        user: str | None = None,
        password: str | None = None,
        creds: Path | None = None,
        tls: ssl.SSLContext | None = None,
        inbox_prefix: str = "_INBOX",
        connect_timeout_s: float = 5.0,
        observer: BusObserver | None = None,
    ) -> Self:
        """Connect; from then on the bus reconnects by itself, for ever.

        Args:
            name: what the server's monitoring shows.
            identity: who we are in the replies of a scatter (an edge: its node); default `name`.
            inbox_prefix: `_INBOX.<project>` or what else these credentials may subscribe to.

        Raises:
            Unavailable: no server answered in time.
            PermissionDenied: the credentials were refused, or do not cover the inbox.
        """
        link = Link(observer or BusObserver())
        credentials = Credentials(user, password, creds, tls)
        await link.open(servers, name, credentials, inbox_prefix, connect_timeout_s)
        mailbox = Mailbox(link, inbox_prefix)
        try:
            await mailbox.open()
        except BaseException:
            await link.close()
            raise
        return cls(link, mailbox, identity or name)

    @property
    def ready(self) -> bool:
        """Connected, and neither draining nor closed."""
        return self._link.ready

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def nats(self) -> Client:
        """The connection itself, for the chassis: JetStream's consumers and management."""
        return self._link.nats

    async def wait_closed(self) -> None:
        """Return when the connection is gone for good."""
        await self._link.wait_closed()

    async def usable(self, *, timeout_s: float) -> None:
        """Wait for the connection, if it is away.

        Raises:
            Unavailable: it did not come back in time, or is closed.
        """
        await self._link.usable(Budget(timeout_s))

    async def flush(self, *, timeout_s: float = 5.0) -> None:
        """Return when the server has processed what was sent so far."""
        await self._link.round_trip(timeout_s)

    async def drain(self, *, timeout_s: float = 10.0) -> None:
        """Take nothing more, finish what is in flight, flush and close; connected or not."""
        budget = Budget(timeout_s)
        await asyncio.gather(*(s.stop(timeout_s=timeout_s) for s in self.servings))
        self.servings.clear()
        await self._link.drain(max(1.0, budget.remaining_s))

    async def close(self) -> None:
        """Close now; whoever waits gets Unavailable."""
        await self._link.close()

    async def request(
        self,
        rpc: AnyRpc[Req, Rep],
        message: Req,
        *,
        budget_s: float,
        request_id: str | None = None,
        headers: Headers | None = None,
        on_part: Callable[[Part], None] | None = None,
        idle_s: float | None = None,
        **to: Unpack[Tokens],
    ) -> Rep:
        """Ask and wait for the answer.

        Args:
            budget_s: for the whole; inside a handler never more than the caller's remainder.
            request_id: default: the current call's, else a new one.
            on_part: called in order with what precedes the answer of a StreamingRpc.
            idle_s: Unavailable after this long without any part.

        Raises:
            DSecError: what the other side answered, with request and trace id.
            Unavailable: nobody answers, or the connection was lost (it may have been carried out).
        """
        subject = rpc.subject(**to)
        out = Outgoing.begin("request", rpc.template, subject, budget_s, request_id, headers)
        waiter = Reply(subject, rpc.owner, on_part=on_part, idle_s=idle_s)
        part = await exchange(self._link, self._mailbox, out, waiter, message.encode())
        return part.decode(rpc.reply)

    @asynccontextmanager
    async def converse(
        self,
        rpc: StreamingRpc[Req, Rep],
        message: Req,
        *,
        budget_s: float,
        request_id: str | None = None,
        headers: Headers | None = None,
        idle_s: float = math.inf,
        limit: int = 256,
        **to: Unpack[Tokens],
    ) -> AsyncIterator[Conversation[Rep]]:
        """Ask, and read the reply stream at one's own pace, at most `limit` parts behind."""
        subject = rpc.subject(**to)
        out = Outgoing.begin("request", rpc.template, subject, budget_s, request_id, headers)
        inbox = Inbox(self._mailbox, limit=limit, asked=subject, owner=rpc.owner)
        async with asking(self._link, out, message.encode(), inbox):
            yield Conversation(inbox, rpc.reply, budget=out.budget, idle_s=idle_s)

    async def gather(
        self,
        rpc: Rpc[Req, Rep],
        message: Req,
        *,
        timeout_s: float,
        expect: Collection[str] = (),
        limit: int = 4096,
        request_id: str | None = None,
        **to: Unpack[Tokens],
    ) -> Gathered[Rep]:
        """Ask everybody who serves the subject.

        Args:
            expect: identities; with them it ends as soon as all have answered, without them only
                after `timeout_s`.
        """
        subject = rpc.subject(**to)
        out = Outgoing.begin("request", rpc.template, subject, timeout_s, request_id, None)
        inbox = Inbox(self._mailbox, limit=limit, asked=subject, owner=rpc.owner)
        async with asking(self._link, out, message.encode(), inbox):
            return await gather(inbox, rpc.reply, budget=out.budget, expect=expect)

    @asynccontextmanager
    async def inbox(self, *, limit: int = 256) -> AsyncIterator[Inbox]:
        """An address for several replies, at most `limit` of them unread."""
        inbox = Inbox(self._mailbox, limit=limit)
        try:
            yield inbox
        finally:
            inbox.close()

    async def send(
        self,
        reply_to: str,
        kind: str,
        message: Message | bytes,
        *,
        nonce: str = "",
        headers: Headers | None = None,
        wait_s: float = 5.0,
    ) -> None:
        """One message to somebody's inbox; `wait_s` bounds the wait for a lost connection.

        Raises:
            InvalidArgument: `reply_to` is not an inbox.
            Unavailable: not connected.
        """
        data = message.encode() if isinstance(message, Message) else message
        own = {H_NONCE: nonce, H_FROM: self._identity, H_KIND: kind, **(headers or {})}
        await fire(self._link, inbox_subject(reply_to), data, own, wait_s=wait_s)

    async def send_error(
        self, reply_to: str, error: DSecError, *, nonce: str = "", wait_s: float = 5.0
    ) -> None:
        """As `send`: the inbox's reader gets `error` raised."""
        reply = ErrorReply.of(error)
        own = {H_NONCE: nonce, H_FROM: self._identity, H_ERROR: error.code}
        await fire(self._link, inbox_subject(reply_to), reply.encode(), own, wait_s=wait_s)

    async def publish(
        self,
        event: Event[Msg],
        message: Msg,
        *,
        headers: Headers | None = None,
        confirm: bool = False,
        **to: Unpack[Tokens],
    ) -> None:
        """Say it once to whoever listens now (core NATS: at most once).

        Args:
            confirm: wait for the server, so that a refusal is raised here instead of counted.

        Raises:
            Unavailable: not connected; nothing is kept for later.
            PermissionDenied: with `confirm`, these credentials may not publish there.
        """
        subject = event.subject(**to)
        mark = self._link.denial_mark()
        await fire(self._link, subject, message.encode(), dict(headers or {}), wait_s=0.0)
        if confirm:
            await self._link.round_trip(5.0)
            denial = self._link.denied_since(mark, "publish", subject)
            if denial is not None:
                raise denial.error()

    async def stream_publish(
        self,
        event: Event[Msg],
        message: Msg,
        *,
        msg_id: str,
        ttl_s: float | None = None,
        budget_s: float = 5.0,
        request_id: str | None = None,
        headers: Headers | None = None,
        **to: Unpack[Tokens],
    ) -> PubAck:
        """Store it in the stream that keeps this subject, and wait for the acknowledgement.

        Args:
            msg_id: one per attempt; publishing the same one again within the stream's window
                stores nothing and says `duplicate`.
            ttl_s: the stream forgets the message after this long; it is the budget that whoever
                takes it out of the stream finds stated.

        Raises:
            QuotaExceeded: the stream is full; `retry_after_s` is set.
            Unavailable: no stream keeps the subject, JetStream is away, or the connection was lost
                (then it may be stored: publish again with the same `msg_id`).
        """
        subject = event.subject(**to)
        extra = {H_MSG_ID: msg_id, **(headers or {})}
        if ttl_s is not None:
            extra[H_TTL] = ttl_header(ttl_s)
            extra[H_BUDGET_MS] = str(int(ttl_s * 1000))
        out = Outgoing.begin("publish", event.template, subject, budget_s, request_id, extra)
        waiter = Reply(subject, "a JetStream stream", raw=True)
        part = await exchange(self._link, self._mailbox, out, waiter, message.encode())
        return PubAck.read(part.data, subject)

    async def ask_server(
        self,
        subject: str,
        data: bytes = b"",
        *,
        label: str = "",
        budget_s: float = 5.0,
        headers: Headers | None = None,
    ) -> Part:
        """Ask the NATS server itself (`$JS.API…`, `$KV…`, an ack's subject), for the chassis.

        Args:
            label: what stands for the subject in spans and metrics; "": in neither.
        """
        out = Outgoing.begin("ask", label, subject, budget_s, None, headers)
        waiter = Reply(subject, "JetStream", raw=True)
        return await exchange(self._link, self._mailbox, out, waiter, data)

    async def serve(
        self,
        rpc: AnyRpc[Req, Rep],
        handler: Callable[[Req, Call], Awaitable[Rep | None]],
        *,
        queue: str = "",
        concurrency: int = 64,
        backlog: int = 0,
        default_budget_s: float = 30.0,
        **to: Unpack[Tokens],
    ) -> Serving:
        """Answer requests, each in a task of its own, within its budget.

        A handler of a StreamingRpc sends parts with `call.send` and may return None when the last
        part it sent was the end.

        Args:
            queue: group that shares the requests; "": every server answers each.
            concurrency, backlog: handlers at once and waiting; beyond that requesters are told
                Unavailable with `retry_after_s` at once.
            default_budget_s: for a message that states none.

        Raises:
            PermissionDenied: these credentials may not serve the subject.
        """
        return await self._serve(
            Endpoint(
                subject=rpc.subject(**to),
                template=rpc.template,
                request=rpc.request,
                handler=handler,
                replies=True,
                queue=queue,
                concurrency=concurrency,
                backlog=backlog,
                default_budget_s=default_budget_s,
                identity=self._identity,
            )
        )

    async def subscribe(
        self,
        event: Event[Msg],
        handler: Callable[[Msg, Call], Awaitable[None]],
        *,
        queue: str = "",
        concurrency: int = 64,
        backlog: int = 1024,
        **to: Unpack[Tokens],
    ) -> Serving:
        """Handle events; one at a time keeps their order; beyond the bound they are dropped."""
        return await self._serve(
            Endpoint(
                subject=event.subject(**to),
                template=event.template,
                request=event.message,
                handler=handler,
                replies=False,
                queue=queue,
                concurrency=concurrency,
                backlog=backlog,
                default_budget_s=EVENT_BUDGET_S,
                identity=self._identity,
            )
        )

    async def _serve(self, endpoint: Endpoint) -> Serving:
        serving = Serving(self._link, endpoint)
        await serving.start()
        self.servings.append(serving)
        return serving
