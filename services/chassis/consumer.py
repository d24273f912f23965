"""A durable pull consumer that replicas of one service share.

Two ways to use one. `run` hands each message to a handler, at most `concurrency` at once, and
settles it by the table in `delivery`. `fetch` gives the deliveries themselves to a caller who
decides when to pull and how to settle, as placement does. Either way messages that cannot be read,
and those whose time is over, are settled before anybody sees them.

Handlers must be idempotent by request id: a delivery may be a repetition.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from datetime import datetime
from typing import Any, Generic, Self, TypeVar

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from pydantic import ValidationError

from libdsec.bus import Bus, Reception, complaint
from libdsec.errors import (
    DeadlineExceeded,
    DSecError,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from libdsec.wire.envelope import Durable, Event
from libdsec.wire.model import Empty, Message

from .clock import Clock, ServerTime
from .delivery import Delivery, Outcome, Retry, outcome_of
from .pull import Puller

M = TypeVar("M", bound=Message)
Handler = Callable[[M, Delivery[M]], Awaitable[None]]

_log = logging.getLogger("dsec.consumer")

_WAIT_S = 2.0  # one pull's time, when there is nothing
_PAUSE_S = 0.5  # between attempts while JetStream is away
_NO_BUDGET_S = 7 * 86_400.0  # for a message that states none


class ConsumerObserver:
    """What a process may want to count; every method does nothing."""

    def settled(self, durable: str, outcome: Outcome, duration_s: float) -> None:
        """A delivery has its outcome."""

    def redelivered(self, durable: str) -> None:
        """A message came for the second time or more."""


class Consumer(Generic[M]):
    """Lifecycle: `async with` → run or fetch (repeatedly) → stop."""

    def __init__(
        self,
        bus: Bus,
        durable: Durable,
        event: Event[M],
        *,
        clock: Clock | None = None,
        observer: ConsumerObserver | None = None,
    ) -> None:
        self.durable = durable
        self._bus = bus
        self._model = event.message
        self._clock = clock or Clock()
        self._observer = observer or ConsumerObserver()
        self._server_time = ServerTime(self._clock)
        self._reception = Reception(event.template, default_budget_s=_NO_BUDGET_S, linked=True)
        self._puller = Puller(bus, durable.stream.name, durable.name)
        self._stopping = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    async def __aenter__(self) -> Self:
        await self._puller.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._puller.__aexit__(*exc)

    async def fetch(self, limit: int, *, wait_s: float) -> list[Delivery[M]]:
        """Up to `limit` deliveries that are there now; if none, what comes within `wait_s`.

        Raises:
            Unavailable, NotFound: JetStream, the stream or the consumer is not there.
        """
        if self._server_time.stale:
            await self._ask_time()
        messages = await self._puller.pull(limit, wait_s=wait_s)
        admitted = [await self._admit(msg) for msg in messages]
        return [delivery for delivery in admitted if delivery is not None]

    async def run(self, handler: Handler[M], *, concurrency: int = 32) -> None:
        """Handle messages until `stop`, then return when the last handler has ended."""
        async with asyncio.TaskGroup() as group:
            while not self._stopping.is_set():
                free = concurrency - len(self._running)
                if free == 0:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                    continue
                for delivery in await self._next(free):
                    work = self._handle(delivery, handler)
                    # An empty context: what is current here must not become current there.
                    task = group.create_task(work, context=Context())
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
        await self._puller.give_back()

    def stop(self) -> None:
        """Pull no more; `run` returns when what is in flight has ended."""
        self._stopping.set()

    async def _next(self, limit: int) -> list[Delivery[M]]:
        """What `fetch` gives; nothing, after a pause, when JetStream is away or we are to stop."""
        pull = asyncio.create_task(self.fetch(limit, wait_s=_WAIT_S))
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({pull, stop}, return_when=asyncio.FIRST_COMPLETED)
            return await pull if pull.done() else []
        except (Unavailable, NotFound, DeadlineExceeded, NatsError) as err:
            _log.warning("consumer %s waits: %s", self.durable.name, err)
            await asyncio.wait({stop}, timeout=_PAUSE_S)
            return []
        finally:
            pull.cancel()
            stop.cancel()

    async def _ask_time(self) -> None:
        asked_s = self._clock.monotonic_s()
        subject = f"$JS.API.CONSUMER.INFO.{self.durable.stream.name}.{self.durable.name}"
        answer = json.loads((await self._bus.ask_server(subject, label="$JS.API")).data)
        if "ts" not in answer:
            raise NotFound(f"there is no consumer {self.durable.name}")
        self._server_time.observe(datetime.fromisoformat(answer["ts"]).timestamp(), asked_s)

    async def _admit(self, msg: Msg) -> Delivery[M] | None:
        """A delivery to work on, or None when the message is already settled."""
        age_s = self._server_time.age_s(msg.metadata.timestamp.timestamp())
        call = self._reception.call(msg, age_s=age_s)
        if msg.metadata.num_delivered > 1:
            self._observer.redelivered(self.durable.name)
        try:
            message = self._model.model_validate_json(msg.data)
        except ValidationError as err:
            raw = Delivery(self._bus, self.durable, msg, Empty(), call, age_s, self._clock)
            await self._settle(raw, Outcome.DEAD, InvalidArgument(complaint(self._model, err)))
            return None
        delivery = Delivery(self._bus, self.durable, msg, message, call, age_s, self._clock)
        if call.budget.expired:
            await self._settle(delivery, Outcome.EXPIRED)
        elif 0 < self.durable.max_deliver < delivery.attempt:
            # Whoever had it before died of it, or it would have an outcome.
            times = delivery.attempt - 1
            await self._settle(
                delivery, Outcome.DEAD, Internal(f"delivered {times} times without an outcome")
            )
        else:
            return delivery
        return None

    async def _handle(self, delivery: Delivery[M], handler: Handler[M]) -> None:
        began_s = self._clock.monotonic_s()
        incoming = self._reception.enter(delivery.call)
        failure: BaseException | None = None
        budget = delivery.call.budget
        try:
            async with delivery.held(), asyncio.timeout(budget.remaining_s):
                await handler(delivery.message, delivery)
        except asyncio.CancelledError as err:
            failure = err
            raise
        except Exception as err:
            failure = err
        finally:
            incoming.end(self._report(delivery, failure))
            outcome = outcome_of(failure, expired=budget.expired, last_try=delivery.last_try)
            await self._settle(delivery, outcome, failure, began_s=began_s)

    def _report(self, delivery: Delivery[M], failure: BaseException | None) -> DSecError | None:
        """How the span ends; a bug is logged here, where its trace is still current."""
        if failure is None or isinstance(failure, Retry | asyncio.CancelledError):
            return None
        if isinstance(failure, DSecError):
            return failure
        if isinstance(failure, TimeoutError) and delivery.call.budget.expired:
            return DeadlineExceeded("the message's budget ran out while it was handled")
        _log.error(
            "consumer %s: handler failed at delivery %d",
            self.durable.name,
            delivery.attempt,
            exc_info=failure,
            extra={"request_id": delivery.call.request_id},
        )
        return Internal(f"{type(failure).__name__} in the handler")

    async def _settle(
        self,
        delivery: Delivery[Any],
        outcome: Outcome,
        failure: BaseException | None = None,
        *,
        began_s: float | None = None,
    ) -> None:
        """Tell the server; if that fails the message comes again, and the handler is idempotent."""
        if not delivery.settled:  # or the handler has done it itself
            try:
                await _carry_out(delivery, outcome, failure)
            except DSecError as err:
                _log.warning("message %d of %s: %s", delivery.seq, self.durable.stream.name, err)
                if outcome is Outcome.DEAD:
                    outcome = Outcome.RETRY
                    await delivery.retry()
        now_s = self._clock.monotonic_s()
        self._observer.settled(self.durable.name, outcome, now_s - (began_s or now_s))


async def _carry_out(
    delivery: Delivery[Any], outcome: Outcome, failure: BaseException | None
) -> None:
    match outcome:
        case Outcome.DONE:
            await delivery.ack()
        case Outcome.RETRY:
            await delivery.retry(_delay_s(failure))
        case Outcome.DEAD:
            await delivery.discard(_reason(failure))
        case Outcome.EXPIRED:
            await delivery.drop()
        case Outcome.LEFT:
            pass


def _delay_s(failure: BaseException | None) -> float | None:
    if isinstance(failure, Retry):
        return failure.delay_s
    return failure.retry_after_s if isinstance(failure, DSecError) else None


def _reason(failure: BaseException | None) -> str:
    if isinstance(failure, DSecError):
        return f"{failure.code}: {failure.message}"
    return f"{type(failure).__name__}: {failure}"
