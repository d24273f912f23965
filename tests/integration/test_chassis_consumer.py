"""Consumers on a real JetStream: outcomes, long work, budgets, restarts, replicas."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from libdsec.bus import Bus
from libdsec.errors import Unavailable
from services.chassis.consumer import Consumer
from services.chassis.dead_letter import DeadLetters
from services.chassis.delivery import Delivery, Outcome, Retry
from services.chassis.topology import ensure_topology

from .conftest import Connect
from .jobs import JOB, WORK, WORKER, Job, Settled, left, put, running
from .servers import NatsServer


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


async def test_work_whose_time_is_over_is_dropped_unseen(topology: Bus) -> None:
    observer, seen = Settled(), []

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        seen.append(job.n)

    await put(topology, 1, ttl_s=0.05)
    await asyncio.sleep(0.06)
    await put(topology, 2, ttl_s=30)
    async with running(topology, work, observer=observer):
        await observer.until(Outcome.DONE)
        await observer.until(Outcome.EXPIRED)
        while await left(topology):
            pass
    assert seen == [2]


async def test_a_delivery_knows_its_age_by_the_servers_clock(topology: Bus) -> None:
    await put(topology, 1, ttl_s=30)
    await asyncio.sleep(0.2)
    async with Consumer(topology, WORKER, JOB) as consumer:
        (delivery,) = await consumer.fetch(5, wait_s=1)
    assert 0.15 < delivery.age_s < 5
    assert 20 < delivery.call.budget.remaining_s < 29.85


async def test_a_message_without_a_ttl_is_never_too_old(topology: Bus) -> None:
    await put(topology, 1)
    async with Consumer(topology, WORKER, JOB) as consumer:
        (delivery,) = await consumer.fetch(1, wait_s=1)
    assert delivery.call.budget.remaining_s > 86_400


async def test_a_handler_that_outlives_the_budget_is_cancelled_and_dropped(topology: Bus) -> None:
    observer = Settled()

    async def work(job: Job, delivery: Delivery[Job]) -> None:
        await asyncio.Event().wait()

    await put(topology, 1, ttl_s=0.3)
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
