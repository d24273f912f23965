"""The outbox on a real stream: batches, outages, gaps, exactly one copy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from libdsec.bus import Bus
from libdsec.wire.envelope import Event, Stream
from libdsec.wire.model import Message
from services.chassis.outbox import Outbox
from services.chassis.topology import ensure_topology

from .servers import NatsServer


class Batch(Message):
    first: int
    records: tuple[str, ...]


HAPPENED = Event("t.node.{node}.happened", Batch)
EVENTS = Stream(
    "EVENTS", ("t.node.*.happened",), work_queue=False, max_age_s=600, max_bytes=1 << 20,
    max_msgs=1000, discard_new=False,
)  # fmt: skip


def pack(first: int, records: Sequence[str]) -> Batch:
    return Batch(first=first, records=tuple(records))


@asynccontextmanager
async def running(outbox: Outbox[str, Batch]) -> AsyncIterator[None]:
    task = asyncio.create_task(outbox.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def stored(bus: Bus) -> list[Batch]:
    js = bus.nats.jetstream()
    count = (await js.stream_info("EVENTS")).state.messages
    messages = [await js.get_msg("EVENTS", seq=n + 1) for n in range(count)]
    return [Batch.model_validate_json(message.data or b"") for message in messages]


async def test_what_happens_together_is_one_message_in_order(bus: Bus) -> None:
    await ensure_topology(bus, streams=[EVENTS])
    acked: list[int] = []
    outbox = Outbox(bus, HAPPENED, pack, session="s1", on_acked=acked.append, node="n1")
    numbers = [outbox.put(str(n)) for n in range(10)]
    async with running(outbox):
        assert await outbox.flush(5) == 0
    assert numbers == list(range(10))
    assert await stored(bus) == [Batch(first=0, records=tuple(str(n) for n in range(10)))]
    assert acked == [9]


async def test_an_outage_delays_records_and_loses_and_repeats_none(
    nats_server: NatsServer, bus: Bus
) -> None:
    await ensure_topology(bus, streams=[EVENTS])
    outbox = Outbox(bus, HAPPENED, pack, session="s1", batch=4, linger_s=0, node="n1")
    async with running(outbox):
        for n in range(10):
            outbox.put(str(n))
        await outbox.flush(5)
        nats_server.kill()
        for n in range(10, 20):
            outbox.put(str(n))
        assert await outbox.flush(0.2) == 10
        nats_server.start()
        assert await outbox.flush(20) == 0
    batches = await stored(bus)
    assert [r for batch in batches for r in batch.records] == [str(n) for n in range(20)]
    assert outbox.dropped == 0


async def test_over_its_bound_the_oldest_go_and_the_gap_shows(bus: Bus) -> None:
    await ensure_topology(bus, streams=[EVENTS])
    drops: list[int] = []
    outbox = Outbox(bus, HAPPENED, pack, session="s1", capacity=3, on_drop=drops.append, node="n1")
    for n in range(5):
        outbox.put(str(n))
    assert (outbox.pending, outbox.dropped, sum(drops)) == (3, 2, 2)
    async with running(outbox):
        assert await outbox.flush(5) == 0
    assert await stored(bus) == [Batch(first=2, records=("2", "3", "4"))]


async def test_a_batch_that_can_never_be_published_is_dropped_and_the_rest_goes_on(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    await ensure_topology(bus, streams=[EVENTS])
    outbox = Outbox(bus, HAPPENED, pack, session="s1", batch=1, linger_s=0, node="n1")
    outbox.put("x" * (2 << 20))
    outbox.put("small")
    async with running(outbox):
        assert await outbox.flush(5) == 0
    assert outbox.dropped == 1
    assert "cannot be published" in caplog.text
    assert await stored(bus) == [Batch(first=1, records=("small",))]
