"""Messages that nobody can handle: kept whole, blocking nothing, shown and replayed."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from libdsec.bus import Bus
from libdsec.errors import InvalidArgument
from libdsec.wire import subjects
from services.chassis.consumer import Consumer
from services.chassis.dead_letter import DeadLetters
from services.chassis.delivery import Delivery, Outcome
from services.chassis.topology import ensure_topology

from .conftest import Connect
from .jobs import JOB, WORK, WORKER, Job, Settled, left, put, running


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
