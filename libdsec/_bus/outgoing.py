"""One message on its way out: its budget, its headers, its span, and what became of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from nats.errors import MaxPayloadError

from ..errors import DSecError, InvalidArgument
from ..wire.envelope import H_BUDGET_MS, H_NONCE, H_REQUEST_ID, H_TRACEPARENT, H_VERSION, VERSION
from ..wire.model import random_token
from .call import Budget, Headers, Part, current_call
from .inbox import Inbox
from .link import Link
from .mailbox import Mailbox, Reply
from .tracing import NO_HOP, Hop, current_traceparent, send_hop


@dataclass(slots=True)
class Outgoing:
    """What is known of a message before anything is sent."""

    operation: str  # request | publish | ask, of the server itself
    template: str
    subject: str
    budget: Budget
    request_id: str
    extra: Headers
    hop: Hop
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(
        cls,
        operation: str,
        template: str,
        subject: str,
        budget_s: float,
        request_id: str | None,
        headers: Headers | None,
    ) -> Outgoing:
        """Take over what the current call, if there is one, passes on.

        Raises:
            InvalidArgument: a token of the subject is missing.
        """
        _check_concrete(subject)
        call = current_call()
        if call is not None:
            budget_s = min(budget_s, call.budget.remaining_s)
            request_id = request_id or call.request_id
        request_id = request_id or random_token()
        hop = send_hop(operation, template, request_id) if template else NO_HOP
        return cls(operation, template, subject, Budget(budget_s), request_id, headers or {}, hop)

    def headers(self, nonce: str) -> dict[str, str]:
        if self.operation == "ask":
            return dict(self.extra)  # the server may store them: only what was meant to be
        headers = {
            H_TRACEPARENT: self.hop.traceparent,
            H_REQUEST_ID: self.request_id,
            H_NONCE: nonce,
            H_VERSION: VERSION,
        }
        if self.operation == "request":  # what is stored outlives the publishing of it
            headers[H_BUDGET_MS] = self.budget.header()
        return headers | dict(self.extra)

    @contextmanager
    def observed(self, link: Link) -> Iterator[None]:
        """End the span and count the outcome; every error leaves with its ids."""
        failure: DSecError | None = None
        try:
            yield
        except DSecError as err:
            failure = err
            err.request_id = err.request_id or self.request_id
            err.trace_id = err.trace_id or self.hop.trace_id
            raise
        finally:
            self.hop.end(failure)
            if self.template:
                outcome = failure.code if failure is not None else "ok"
                link.observer.sent(self.template, outcome, time.monotonic() - self.began)


async def send(link: Link, out: Outgoing, data: bytes, nonce: str, reply_to: str) -> None:
    """Wait for the connection if it is away, and hand the message over.

    Raises:
        Unavailable: the connection did not come back within the budget.
        InvalidArgument: the message is larger than the server takes.
    """
    await link.usable(out.budget)
    await _publish(link, out.subject, data, out.headers(nonce), reply_to)


async def exchange(link: Link, mailbox: Mailbox, out: Outgoing, waiter: Reply, data: bytes) -> Part:
    """Send, and wait for what ends the replies.

    Raises:
        DSecError: what the other side answered, or why there is no answer.
    """
    token = mailbox.add(waiter)
    try:
        with out.observed(link):
            await send(link, out, data, token, mailbox.address(token))
            part = await waiter.wait(out.budget.remaining_s)
            if not waiter.raw and (err := part.error()) is not None:
                raise err
            return part
    finally:
        mailbox.remove(token)
        waiter.abandon()


@asynccontextmanager
async def asking(link: Link, out: Outgoing, data: bytes, inbox: Inbox) -> AsyncIterator[None]:
    """Send with `inbox` as the reply address; it is closed in the end."""
    try:
        with out.observed(link):
            await send(link, out, data, inbox.nonce, inbox.subject)
            yield
    finally:
        inbox.close()


async def fire(
    link: Link, subject: str, data: bytes, headers: dict[str, str], *, wait_s: float
) -> None:
    """Send what nobody answers; it belongs to the current span and call, if there are any."""
    _check_concrete(subject)
    if traceparent := current_traceparent():
        headers[H_TRACEPARENT] = traceparent
    if (call := current_call()) is not None:
        headers.setdefault(H_REQUEST_ID, call.request_id)
    headers[H_VERSION] = VERSION
    await link.usable(Budget(wait_s))
    await _publish(link, subject, data, headers)


def inbox_subject(reply_to: str) -> str:
    """`reply_to`, which came in a payload, if it is an inbox and nothing else."""
    if not reply_to.startswith("_INBOX."):
        raise InvalidArgument(
            f"{reply_to[:80]!r} is not an inbox", hint="reply_to starts with _INBOX.<project>."
        )
    return reply_to


async def _publish(
    link: Link, subject: str, data: bytes, headers: dict[str, str], reply_to: str = ""
) -> None:
    try:
        await link.publish(subject, data, headers, reply_to)
    except MaxPayloadError as err:
        raise InvalidArgument(
            f"the message's {len(data)} bytes are more than NATS takes ({link.nats.max_payload})",
            hint="send large data in chunks",
        ) from err


def _check_concrete(subject: str) -> None:
    if "*" in subject or ">" in subject:
        raise InvalidArgument(f"{subject} does not say to whom: a part of the address is missing")
