"""A work queue of jobs and its consumer, for the tests of streams and deliveries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from libdsec.bus import Bus
from libdsec.wire.envelope import Durable, Event, Stream
from libdsec.wire.model import Message
from services.chassis.consumer import Consumer, ConsumerObserver
from services.chassis.delivery import Delivery, Outcome


class Job(Message):
    n: int


JOB = Event("t.p.{project}.job.{tail}", Job)
WORK = Stream(
    "WORK", ("t.p.*.job.>",), work_queue=True, max_age_s=600, max_bytes=1 << 20, max_msgs=50,
    discard_new=True, allow_ttl=True,
)  # fmt: skip
WORKER = Durable(
    "worker", WORK, "t.p.*.job.>", ack_wait_s=30, max_deliver=3, max_ack_pending=100,
    backoff_s=(0.02,),
)  # fmt: skip

Work = Callable[[Job, Delivery[Job]], Awaitable[None]]


class Settled(ConsumerObserver):
    """Remembers outcomes and lets a test wait for them."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.redeliveries = 0
        self._changed = asyncio.Event()

    def settled(self, durable: str, outcome: Outcome, duration_s: float) -> None:
        self.outcomes.append(outcome)
        self._changed.set()

    def redelivered(self, durable: str) -> None:
        self.redeliveries += 1

    async def until(self, outcome: Outcome, times: int = 1) -> None:
        async with asyncio.timeout(10):
            while self.outcomes.count(outcome) < times:
                self._changed.clear()
                await self._changed.wait()


async def put(bus: Bus, *numbers: int, ttl_s: float | None = None) -> None:
    for n in numbers:
        await bus.stream_publish(JOB, Job(n=n), msg_id=f"m{n}", project="p1", tail="x", ttl_s=ttl_s)


async def left(bus: Bus, stream: str = "WORK") -> int:
    """Messages in the stream once what was said to the server has been heard."""
    await bus.flush()
    return int((await bus.nats.jetstream().stream_info(stream)).state.messages)


@contextlib.asynccontextmanager
async def running(
    bus: Bus,
    work: Work,
    *,
    durable: Durable = WORKER,
    observer: ConsumerObserver | None = None,
    concurrency: int = 32,
) -> AsyncIterator[Consumer[Job]]:
    async with Consumer(bus, durable, JOB, observer=observer) as consumer:
        task = asyncio.create_task(consumer.run(work, concurrency=concurrency))
        try:
            yield consumer
        finally:
            consumer.stop()
            await asyncio.wait_for(task, 10)
