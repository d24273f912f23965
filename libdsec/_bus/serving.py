"""One subscription whose messages are handled concurrently, within a bound.

The client library runs a subscription's callback for one message at a time, in the context of
whoever subscribed, and ends the subscription silently when a cancellation escapes it. So the
callback here only admits: each message gets a task of its own, in an empty context, and nothing a
handler does reaches the subscription. Exceptions become error replies in one place, `_outcome`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from pydantic import ValidationError

from ..errors import DataLoss, DeadlineExceeded, DSecError, Internal, InvalidArgument, Unavailable
from ..wire.envelope import H_ERROR, H_FROM, H_KIND, H_NONCE
from ..wire.error import ErrorReply
from ..wire.model import Message
from .call import NONCE, REQUEST_ID, Call, Headers, PartSink, lowered
from .incoming import Reception
from .link import Link

_log = logging.getLogger("libdsec.bus")

BUSY_RETRY_S = 0.25


@dataclass(frozen=True)
class Endpoint:
    """What is served: one subject's messages and the bound on handling them."""

    subject: str
    template: str
    request: type[Message]
    handler: Callable[[Any, Call], Awaitable[Message | None]]
    replies: bool
    queue: str
    concurrency: int
    backlog: int
    default_budget_s: float
    identity: str


@dataclass(slots=True)
class Tally:
    """What one subscription has done so far; `$SRV.STATS` shows it."""

    requests: int = 0
    failures: int = 0
    refused: int = 0
    busy_s: float = 0.0
    last_error: str = ""

    def add(self, duration_s: float, error: DSecError | None) -> None:
        self.requests += 1
        self.busy_s += duration_s
        if error is not None:
            self.failures += 1
            self.last_error = error.code


class Serving:
    """A running subscription: `stop()` takes no more and lets finish what runs."""

    def __init__(self, link: Link, endpoint: Endpoint) -> None:
        self._link = link
        self._endpoint = endpoint
        self.tally = Tally()
        self._reception = Reception(
            endpoint.template,
            default_budget_s=endpoint.default_budget_s,
            rooted=endpoint.replies,
        )
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscription: Subscription | None = None

    @property
    def subject(self) -> str:
        return self._endpoint.subject

    @property
    def template(self) -> str:
        return self._endpoint.template

    @property
    def queue(self) -> str:
        return self._endpoint.queue

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    async def start(self) -> None:
        """Subscribe.

        Raises:
            PermissionDenied: these credentials may not subscribe there.
        """
        self._subscription = await self._link.subscribe(
            self._endpoint.subject, self._on_message, queue=self._endpoint.queue
        )

    async def stop(self, *, timeout_s: float = 30.0) -> int:
        """Take no more, wait for what runs, then cancel it; returns how many were cancelled."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._link.unsubscribe(subscription, timeout_s)
        late: set[asyncio.Task[None]] = set()
        if self._tasks:
            _, late = await asyncio.wait(tuple(self._tasks), timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=1.0)
        return len(late)

    async def _on_message(self, msg: Msg) -> None:
        if len(self._tasks) >= self._endpoint.concurrency + self._endpoint.backlog:
            await self._refuse(msg)
            return
        task = asyncio.get_running_loop().create_task(self._run(msg), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _refuse(self, msg: Msg) -> None:
        self.tally.refused += 1
        self._link.observer.dropped(self._endpoint.template, "busy")
        if self._endpoint.replies and msg.reply:
            busy = Unavailable(
                f"{self._endpoint.identity} already handles {len(self._tasks)} such requests",
                retry_after_s=BUSY_RETRY_S,
            )
            headers = lowered(msg.headers)
            await self._reply_error(msg.reply, headers, busy, headers.get(REQUEST_ID, ""), "")

    async def _run(self, msg: Msg) -> None:
        began = time.monotonic()
        sink = self._sink(msg) if msg.reply else None
        incoming = self._reception.enter(self._reception.call(msg, sink=sink))
        call = incoming.call
        error: DSecError | None = None
        try:
            async with self._slots:
                reply = await self._outcome(msg.data, call)
            if self._endpoint.replies and msg.reply and reply is not None:
                await self._reply(msg.reply, reply.encode(), self._reply_headers(call.headers))
        except DSecError as err:
            error = err
            await self._fail(msg.reply, call, err)
        except asyncio.CancelledError:
            # Without retry_after_s, which would say that nothing has been done yet.
            error = Unavailable(
                f"{self._endpoint.identity} is stopping and cut the request off",
                hint="it may have been carried out: repeat it with the same id or key",
            )
            await self._fail(msg.reply, call, error)
            raise
        finally:
            incoming.end(error)
            duration_s = time.monotonic() - began
            self.tally.add(duration_s, error)
            outcome = error.code if error is not None else "ok"
            self._link.observer.handled(self._endpoint.template, outcome, duration_s)

    async def _outcome(self, data: bytes, call: Call) -> Message | None:
        """The handler's answer, or the DSecError that stands for whatever went wrong."""
        try:
            request = self._endpoint.request.model_validate_json(data)
        except ValidationError as err:
            raise InvalidArgument(complaint(self._endpoint.request, err)) from err
        if call.budget.expired:
            raise DeadlineExceeded("the request's budget ran out before it could be handled")
        try:
            async with asyncio.timeout(call.budget.remaining_s) as deadline:
                return await self._endpoint.handler(request, call)
        except DSecError:
            raise
        except TimeoutError as err:
            if deadline.expired():
                raise DeadlineExceeded("the request's budget ran out while it was handled") from err
            raise self._bug(call, err) from err
        except asyncio.CancelledError as err:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._bug(call, err) from err  # the handler cancelled itself, nobody else did
        except Exception as err:
            raise self._bug(call, err) from err

    def _bug(self, call: Call, err: BaseException) -> Internal:
        _log.error(
            "handler of %s failed",
            self._endpoint.template,
            exc_info=err,
            extra={"request_id": call.request_id, "trace_id": call.trace_id},
        )
        return Internal(
            f"{self._endpoint.identity} failed to handle the request",
            hint="the cause is in its log, under the trace id",
        )

    async def _fail(self, reply_to: str, call: Call, err: DSecError) -> None:
        if self._endpoint.replies:
            await self._reply_error(reply_to, call.headers, err, call.request_id, call.trace_id)
        elif not isinstance(err, Internal):
            _log.warning("event on %s: %s", call.subject, err)

    async def _reply_error(
        self, reply_to: str, headers: Headers, err: DSecError, request_id: str, trace_id: str
    ) -> None:
        if reply_to:
            reply = ErrorReply.of(err, request_id=request_id, trace_id=trace_id)
            await self._reply(
                reply_to, reply.encode(), {**self._reply_headers(headers), H_ERROR: err.code}
            )

    def _reply_headers(self, headers: Headers) -> dict[str, str]:
        return {H_NONCE: headers.get(NONCE, ""), H_FROM: self._endpoint.identity}

    async def _reply(self, reply_to: str, data: bytes, headers: dict[str, str]) -> None:
        try:
            await self._link.publish(reply_to, data, headers)
        except MaxPayloadError as err:
            raise DataLoss(
                f"the reply's {len(data)} bytes are more than one message holds",
                hint="ask for less at once",
            ) from err
        except (NatsError, Unavailable) as err:
            # Nobody can be told: the requester learns from its own connection or its budget.
            _log.warning("reply on %s was not sent: %r", self._endpoint.template, err)
            self._link.observer.dropped(self._endpoint.template, "reply")

    def _sink(self, msg: Msg) -> PartSink:
        own = self._reply_headers(lowered(msg.headers))

        async def send(kind: str, data: bytes, headers: Headers) -> None:
            await self._reply(msg.reply, data, {**own, H_KIND: kind, **headers})

        return send


def complaint(model: type[Message], err: ValidationError) -> str:
    """What is wrong with a message, without repeating its values: they may be secrets."""
    faults = [
        f"{'.'.join(str(part) for part in fault['loc']) or 'message'}: {fault['msg']}"
        for fault in err.errors(include_input=False, include_url=False, include_context=False)[:5]
    ]
    return f"{model.__name__} is malformed: {'; '.join(faults)}"
