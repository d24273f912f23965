"""Streams, consumers and buckets become what is declared, however often and from where."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from libdsec.bus import Bus
from libdsec.errors import Conflict, Unavailable
from libdsec.wire import subjects
from libdsec.wire.envelope import Bucket, Durable, Stream
from libdsec.wire.model import Empty
from services.chassis.topology import ensure_topology

from .conftest import Connect
from .servers import NatsServer

WORK = Stream(
    "WORK", ("t.work.>",), work_queue=True, max_age_s=600, max_bytes=1 << 20, max_msgs=100,
    discard_new=True, allow_ttl=True,
)  # fmt: skip
WORKER = Durable("worker", WORK, "t.work.>", ack_wait_s=30, max_deliver=-1, max_ack_pending=16)
NOTES = Bucket("NOTES", Empty, ttl_s=5)


async def test_everything_the_wire_declares_can_be_made_and_made_again(bus: Bus) -> None:
    for _ in range(2):
        await ensure_topology(
            bus,
            streams=subjects.STREAMS,
            durables=subjects.LANES.values(),
            buckets=subjects.BUCKETS,
        )
    js = bus.nats.jetstream()
    placements = (await js.stream_info("PLACEMENTS")).config
    assert placements.subjects == list(subjects.PLACEMENTS.subjects)
    assert placements.allow_msg_ttl
    assert placements.max_age == subjects.PLACEMENTS.max_age_s


async def test_replicas_starting_together_agree(connect: Connect) -> None:
    buses = [await connect(f"replica{n}") for n in range(4)]
    async with asyncio.TaskGroup() as group:
        for each in buses:
            group.create_task(
                ensure_topology(each, streams=[WORK], durables=[WORKER], buckets=[NOTES])
            )


async def test_a_changed_declaration_changes_what_exists(bus: Bus) -> None:
    await ensure_topology(bus, streams=[WORK], durables=[WORKER], buckets=[NOTES])
    await ensure_topology(
        bus,
        streams=[dataclasses.replace(WORK, max_msgs=7, duplicate_window_s=30)],
        durables=[dataclasses.replace(WORKER, ack_wait_s=5)],
        buckets=[dataclasses.replace(NOTES, ttl_s=9)],
    )
    js = bus.nats.jetstream()
    stream = (await js.stream_info("WORK")).config
    assert (stream.max_msgs, stream.duplicate_window) == (7, 30)
    consumer = (await js.consumer_info("WORK", "worker")).config
    assert consumer is not None
    assert consumer.ack_wait == 5
    assert (await js.stream_info("KV_NOTES")).config.max_age == 9


async def test_what_cannot_be_changed_is_an_error_that_names_it(bus: Bus) -> None:
    await ensure_topology(bus, streams=[WORK])
    with pytest.raises(Conflict, match="stream WORK cannot be given retention="):
        await ensure_topology(bus, streams=[dataclasses.replace(WORK, work_queue=False)])


async def test_overlapping_consumers_of_a_work_queue_are_refused_with_their_name(bus: Bus) -> None:
    await ensure_topology(bus, streams=[WORK], durables=[WORKER])
    with pytest.raises(Conflict, match="consumer second of stream WORK cannot be made"):
        await ensure_topology(bus, durables=[dataclasses.replace(WORKER, name="second")])


async def test_a_server_without_jetstream_is_unavailable(tmp_path: object) -> None:
    server = NatsServer(tmp_path / "plain", jetstream=False).start()  # type: ignore[operator]
    bus = await Bus.connect([server.url], name="t")
    try:
        with pytest.raises(Unavailable, match="stream WORK"):
            await ensure_topology(bus, streams=[WORK])
    finally:
        await bus.close()
        server.terminate()
