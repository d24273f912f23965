"""Consumers on a real JetStream: every outcome, long work, poison, restarts, replicas."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from libdsec.bus import Bus
from libdsec.errors import InvalidArgument, QuotaExceeded, Unavailable
from libdsec.wire import subjects
from libdsec.wire.envelope import Durable, Event, Stream
from libdsec.wire.model import Message
from services.chassis.consumer import Consumer, ConsumerObserver
from services.chassis.dead_letter import DeadLetters
from services.chassis.delivery import Delivery, Outcome, Retry
from services.chassis.topology import ensure_topology

from .conftest import Connect
from .servers import NatsServer


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


@pytest.fixture
async def topology(bus: Bus) -> Bus:
    await ensure_topology(bus, streams=[WORK, subjects.DLQ], durables=[WORKER])
    return bus


async def put(bus: Bus, *numbers: int, budget_s: float = 60, **options: float) -> None:
    for n in numbers:
        await bus.stream_publish(
            JOB, Job(n=n), msg_id=f"m{n}", project="p1", tail="x", budget_s=budget_s,
            ttl_s=options.get("ttl_s"),
        )  # fmt: skip


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


async def test_done_work_is_acknowledged_and_gone(topology: Bus) -> None:
    observer, seen = Settled(), []

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        seen.append((job.n, delivery.call.project, delivery.call.tail, delivery.attempt))

    await put(topology, 1, 2, 3)
    async with running(topology, work, observer=observer):
        await observer.until(Outcome.DONE, 3)
        while await left(topology):
            pass
    assert sorted(seen) == [(n, "p1", "x", 1) for n in (1, 2, 3)]


async def test_a_message_nobody_can_read_dies_at_once_and_blocks_nothing(topology: Bus) -> None:
    observer = Settled()

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        pass

    js = topology.nats.jetstream()
    await js.publish("t.p.p1.job.x", b'{"n": "seven"}', headers={"Dsec-Request-Id": "r1"})
    await js.publish("t.p.p1.job.x", b"\xff not json")
    await put(topology, 1)
    async with running(topology, work, observer=observer):
        await observer.until(Outcome.DONE)
        await observer.until(Outcome.DEAD, 2)
        while await left(topology):
            pass
    listing = await DeadLetters(topology).list(10)
    assert listing.total == 2
    first = listing.letters[0]
    assert (first.subject, first.stream, first.payload) == (
        "t.p.p1.job.x", "WORK", b'{"n": "seven"}',
    )  # fmt: skip
    assert first.headers["Dsec-Request-Id"] == "r1"
    assert "Job is malformed: n:" in first.reason
    assert "seven" not in first.reason


async def test_refused_work_dies_with_its_reason(topology: Bus) -> None:
    observer = Settled()

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        raise InvalidArgument("no such layer")

    await put(topology, 1)
    async with running(topology, work, observer=observer):
        await observer.until(Outcome.DEAD)
    (letter,) = (await DeadLetters(topology).list(10)).letters
    assert letter.reason == "invalid_argument: no such layer"


async def test_a_bug_is_tried_again_and_then_dies_instead_of_staying(
    topology: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    observer, attempts = Settled(), []

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        attempts.append(delivery.attempt)
        raise RuntimeError("boom")

    await put(topology, 1)
    async with running(topology, work, observer=observer):
        await observer.until(Outcome.DEAD)
        while await left(topology):
            pass
    assert attempts == [1, 2, 3]
    (letter,) = (await DeadLetters(topology).list(10)).letters
    assert (letter.reason, letter.deliveries) == ("RuntimeError: boom", 3)


async def test_a_refusal_that_may_pass_is_tried_until_it_does(topology: Bus) -> None:
    observer, attempts = Settled(), []

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        attempts.append(delivery.attempt)
        if delivery.attempt == 1:
            raise Unavailable("not yet")
        if delivery.attempt == 2:
            raise Retry("still not", delay_s=0.01)

    await put(topology, 1)
    async with running(topology, work, observer=observer):
        await observer.until(Outcome.DONE)
    assert attempts == [1, 2, 3]
    assert observer.redeliveries == 2
    assert (await DeadLetters(topology).list(10)).total == 0


async def test_long_work_stays_ours(bus: Bus) -> None:
    durable = dataclasses.replace(WORKER, ack_wait_s=0.3)
    await ensure_topology(bus, streams=[WORK], durables=[durable])
    observer, attempts = Settled(), []

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        attempts.append(delivery.attempt)
        await asyncio.sleep(1.0)

    await put(bus, 1)
    async with running(bus, work, durable=durable, observer=observer):
        await observer.until(Outcome.DONE)
        while await left(bus):
            pass
    assert attempts == [1]


async def test_poison_that_kills_its_readers_dies_in_the_end(bus: Bus) -> None:
    """The readers here never say anything, as if each delivery had killed its process."""
    durable = dataclasses.replace(WORKER, ack_wait_s=0.05, max_deliver=2)
    await ensure_topology(bus, streams=[WORK, subjects.DLQ], durables=[durable])
    await put(bus, 1)
    async with Consumer(bus, durable, JOB) as consumer:
        for attempt in (1, 2):
            (delivery,) = await consumer.fetch(1, wait_s=2)
            assert delivery.attempt == attempt
        assert await consumer.fetch(1, wait_s=0.5) == []
    assert await left(bus) == 0
    (letter,) = (await DeadLetters(bus).list(10)).letters
    assert letter.reason == "internal: delivered 2 times without an outcome"


async def test_work_whose_time_is_over_is_dropped_unseen(topology: Bus) -> None:
    observer, seen = Settled(), []

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        seen.append(job.n)

    await put(topology, 1, budget_s=0.05)
    await asyncio.sleep(0.06)
    await put(topology, 2, budget_s=30)
    async with running(topology, work, observer=observer):
        await observer.until(Outcome.DONE)
        await observer.until(Outcome.EXPIRED)
        while await left(topology):
            pass
    assert seen == [2]


async def test_a_delivery_knows_its_age_by_the_servers_clock(topology: Bus) -> None:
    await put(topology, 1, budget_s=30)
    await asyncio.sleep(0.2)
    async with Consumer(topology, WORKER, JOB) as consumer:
        (delivery,) = await consumer.fetch(5, wait_s=1)
    assert 0.15 < delivery.age_s < 5
    assert 20 < delivery.call.budget.remaining_s < 29.85


async def test_a_handler_that_outlives_the_budget_is_cancelled_and_dropped(topology: Bus) -> None:
    observer = Settled()

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        await asyncio.Event().wait()

    await put(topology, 1, budget_s=0.3)
    async with running(topology, work, observer=observer):
        await observer.until(Outcome.EXPIRED)
        while await left(topology):
            pass


async def test_the_stream_itself_forgets_a_message_after_its_ttl(topology: Bus) -> None:
    await put(topology, 1, ttl_s=1)
    assert await left(topology) == 1
    async with asyncio.timeout(5):
        while await left(topology):
            await asyncio.sleep(0.05)


async def test_at_most_so_many_are_handled_at_once_and_that_many_are(topology: Bus) -> None:
    observer = Settled()
    together = asyncio.Barrier(5)
    now, most = 0, 0

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await together.wait()
        now -= 1

    await put(topology, *range(20))
    async with running(topology, work, observer=observer, concurrency=5):
        await observer.until(Outcome.DONE, 20)
    assert most == 5


async def test_one_message_does_not_wait_for_a_batch(topology: Bus) -> None:
    async with Consumer(topology, WORKER, JOB) as consumer:
        waiting = asyncio.create_task(consumer.fetch(64, wait_s=30))
        await asyncio.sleep(0.05)
        await put(topology, 1)
        async with asyncio.timeout(1):
            (delivery,) = await waiting
        await delivery.ack()


async def test_stop_finishes_what_runs_and_leaves_the_rest_to_others(
    topology: Bus, connect: Connect
) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(job: Job, delivery: Delivery[Job]) -> None:
        entered.set()
        await release.wait()

    await put(topology, *range(4))
    mine, theirs = Settled(), Settled()
    async with Consumer(topology, WORKER, JOB, observer=mine) as consumer:
        task = asyncio.create_task(consumer.run(slow, concurrency=1))
        await entered.wait()
        consumer.stop()
        release.set()
        async with asyncio.timeout(5):
            await task
    assert mine.outcomes == [Outcome.DONE]

    async def fast(job: Job, delivery: Delivery[Job]) -> None:
        assert delivery.attempt == 1

    async with running(await connect("other"), fast, observer=theirs):
        await theirs.until(Outcome.DONE, 3)


async def test_a_cancelled_handler_leaves_its_message_to_the_next(
    bus: Bus, connect: Connect
) -> None:
    durable = dataclasses.replace(WORKER, ack_wait_s=0.2)
    await ensure_topology(bus, streams=[WORK], durables=[durable])
    entered = asyncio.Event()

    async def stuck(job: Job, delivery: Delivery[Job]) -> None:
        entered.set()
        await asyncio.Event().wait()

    await put(bus, 1)
    observer = Settled()
    async with Consumer(bus, durable, JOB) as consumer:
        task = asyncio.create_task(consumer.run(stuck))
        await entered.wait()
        task.cancel()
        await asyncio.wait({task})
    attempts: list[int] = []

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        attempts.append(delivery.attempt)

    async with running(await connect("other"), work, durable=durable, observer=observer):
        await observer.until(Outcome.DONE)
    assert attempts == [2]


async def test_replicas_share_one_durable(topology: Bus, connect: Connect) -> None:
    seen: list[int] = []
    observer = Settled()

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        seen.append(job.n)

    async with (
        running(await connect("a"), work, observer=observer, concurrency=2),
        running(await connect("b"), work, observer=observer, concurrency=2),
    ):
        await put(topology, *range(40))
        await observer.until(Outcome.DONE, 40)
    assert sorted(seen) == list(range(40))


async def test_a_consumer_goes_on_after_the_server_was_killed(
    nats_server: NatsServer, bus: Bus, topology: Bus
) -> None:
    observer = Settled()
    seen: set[int] = set()

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        seen.add(job.n)

    async with running(bus, work, observer=observer):
        await put(bus, 1)
        await observer.until(Outcome.DONE)
        nats_server.kill()
        nats_server.start()
        async with asyncio.timeout(20):
            while 2 not in seen:
                with contextlib.suppress(Unavailable):
                    await put(bus, 2)
                await asyncio.sleep(0.05)


async def test_the_same_publish_twice_is_stored_once(topology: Bus) -> None:
    first = await topology.stream_publish(JOB, Job(n=1), msg_id="a", project="p1", tail="x")
    again = await topology.stream_publish(JOB, Job(n=1), msg_id="a", project="p1", tail="x")
    assert (first.duplicate, again.duplicate) == (False, True)
    assert first.seq == again.seq


async def test_a_full_stream_refuses_with_the_time_to_try_again(topology: Bus) -> None:
    await put(topology, *range(50))
    with pytest.raises(QuotaExceeded, match="queue is full") as caught:
        await put(topology, 50)
    assert caught.value.retry_after_s
    assert caught.value.retryable


async def test_a_subject_that_no_stream_keeps_is_unavailable_at_once(bus: Bus) -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable, match="a JetStream stream is not there"):
        await put(bus, 1)
    assert time.monotonic() - began < 2


async def test_dead_letters_are_replayed_once_and_discarded(topology: Bus) -> None:
    observer = Settled()
    broken = True
    done: list[int] = []

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        if broken:
            raise InvalidArgument("not now")
        done.append(job.n)

    letters = DeadLetters(topology)
    async with running(topology, work, observer=observer):
        await put(topology, 1, 2, 3)
        await observer.until(Outcome.DEAD, 3)
        listing = await letters.list(2)
        assert (listing.total, len(listing.letters)) == (3, 2)  # the newest two
        by_job = {
            Job.model_validate_json(letter.payload).n: letter.seq
            for letter in (await letters.list(10)).letters
        }
        broken = False
        outcome = await letters.replay([by_job[1], by_job[1], 999])
        assert outcome.done == (by_job[1],)
        assert set(outcome.failed) == {by_job[1], 999}
        await observer.until(Outcome.DONE)
        assert (await letters.discard([by_job[2]])).done == (by_job[2],)
    assert done == [1]
    assert [letter.seq for letter in (await letters.list(10)).letters] == [by_job[3]]


async def test_operators_reach_the_dead_letters_over_the_bus(
    topology: Bus, connect: Connect
) -> None:
    await DeadLetters(topology).serve("schedulers")
    operator = await connect("operator")
    listing = await operator.request(
        subjects.DLQ_LIST, subjects.deadletter.DeadLetterQuery(), budget_s=5
    )
    assert (listing.total, listing.letters) == (0, ())
