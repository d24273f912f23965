"""KV buckets: typed values, compare-and-set, expiry, and watches that survive an outage."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from libdsec.bus import Bus
from libdsec.errors import AlreadyExists, Conflict, DataLoss, InvalidArgument, Unavailable
from libdsec.wire.envelope import Bucket
from libdsec.wire.model import Message
from services.chassis.kv import Entry, KeyValue
from services.chassis.kv_watch import Change, scan, watch
from services.chassis.topology import ensure_topology

from .conftest import Connect
from .servers import NatsServer


class Note(Message):
    text: str


NOTES = Bucket("NOTES", Note, ttl_s=3600)


@pytest.fixture
async def notes(bus: Bus) -> KeyValue[Note]:
    await ensure_topology(bus, buckets=[NOTES])
    return KeyValue(bus, NOTES)


async def test_a_value_comes_back_with_its_revision(notes: KeyValue[Note]) -> None:
    assert await notes.get("a.b") is None
    revision = await notes.put("a.b", Note(text="x"))
    assert await notes.get("a.b") == Entry("a.b", Note(text="x"), revision)


async def test_only_one_of_many_creates_wins(notes: KeyValue[Note]) -> None:
    async def create(n: int) -> bool:
        try:
            await notes.create("k", Note(text=str(n)))
        except AlreadyExists:
            return False
        return True

    won = await asyncio.gather(*(create(n) for n in range(8)))
    assert won.count(True) == 1
    entry = await notes.get("k")
    assert entry is not None
    assert entry.value.text == str(won.index(True))


async def test_an_update_needs_the_last_revision(notes: KeyValue[Note]) -> None:
    first = await notes.create("k", Note(text="1"))
    second = await notes.update("k", Note(text="2"), first)
    with pytest.raises(Conflict, match="somebody else was first"):
        await notes.update("k", Note(text="3"), first)
    with pytest.raises(Conflict):
        await notes.delete("k", revision=first)
    await notes.delete("k", revision=second)
    assert await notes.get("k") is None


async def test_a_deleted_key_can_be_created_again(notes: KeyValue[Note]) -> None:
    await notes.create("k", Note(text="1"))
    await notes.delete("k")
    await notes.create("k", Note(text="2"))
    with pytest.raises(AlreadyExists):
        await notes.create("k", Note(text="3"))


async def test_a_key_with_a_ttl_expires_and_watchers_see_it(
    bus: Bus, notes: KeyValue[Note]
) -> None:
    changes = watch(bus, notes)
    await notes.create("k", Note(text="1"), ttl_s=1)
    assert (await anext(changes)).value == Note(text="1")
    async with asyncio.timeout(5):
        gone = await anext(changes)
    assert (gone.key, gone.value) == ("k", None)
    assert await notes.get("k") is None
    await notes.create("k", Note(text="2"))
    await changes.aclose()


@pytest.mark.parametrize("key", ["a:b", "a b", "", "a..b", "a.*", ">"])
async def test_what_is_no_key_is_refused_before_the_server_sees_it(
    notes: KeyValue[Note], key: str
) -> None:
    with pytest.raises(InvalidArgument, match="is not a key"):
        await notes.put(key, Note(text="x"))


async def test_a_value_of_another_type_is_data_loss_and_stops_no_watch(
    bus: Bus, notes: KeyValue[Note]
) -> None:
    await bus.nats.jetstream().publish("$KV.NOTES.bad", b"{}")
    await notes.put("good", Note(text="x"))
    with pytest.raises(DataLoss, match="bad in NOTES is not a Note"):
        await notes.get("bad")
    assert await scan(bus, notes) == {"good": Note(text="x")}


async def test_a_scan_sees_what_is_there_and_not_what_was_deleted(
    bus: Bus, notes: KeyValue[Note]
) -> None:
    assert await scan(bus, notes) == {}
    for n in range(300):  # more than one pull's worth
        await notes.put(f"p.{n}", Note(text=str(n)))
    await notes.delete("p.7")
    await notes.put("q.1", Note(text="q"))
    assert await scan(bus, notes, "q.*") == {"q.1": Note(text="q")}
    found = await scan(bus, notes, "p.>")
    assert set(found) == {f"p.{n}" for n in range(300)} - {"p.7"}


async def test_a_watch_begins_with_what_is_there(bus: Bus, notes: KeyValue[Note]) -> None:
    await notes.put("a", Note(text="1"))
    await notes.put("b", Note(text="2"))
    async with contextlib.aclosing(watch(bus, notes)) as changes:
        first, second = await anext(changes), await anext(changes)
        assert {first.key, second.key} == {"a", "b"}
        await notes.delete("a")
        third = await anext(changes)
        assert (third.key, third.value, third.current) == ("a", None, True)


async def test_a_watch_goes_on_after_the_server_was_away(
    nats_server: NatsServer, bus: Bus, connect: Connect, notes: KeyValue[Note]
) -> None:
    """Also a key whose every trace was purged meanwhile is reported as gone, and nothing twice."""
    await notes.put("stays", Note(text="1"))
    await notes.put("vanishes", Note(text="2"))
    changes = watch(bus, notes)
    assert {(await anext(changes)).key, (await anext(changes)).key} == {"stays", "vanishes"}
    nats_server.terminate()
    nats_server.start()
    writer = await connect("writer")
    other = KeyValue(writer, NOTES)
    await writer.nats.jetstream().purge_stream("KV_NOTES", subject="$KV.NOTES.vanishes")
    await other.put("new", Note(text="3"))
    seen: dict[str, Note | None] = {}
    async with asyncio.timeout(15):
        while len(seen) < 2:
            change: Change[Note] = await anext(changes)
            assert change.key not in seen
            seen[change.key] = change.value
    assert seen == {"new": Note(text="3"), "vanishes": None}
    await changes.aclose()


async def test_an_outage_is_unavailable_within_the_budget(
    nats_server: NatsServer, bus: Bus, notes: KeyValue[Note]
) -> None:
    nats_server.kill()
    async with asyncio.timeout(3):
        with pytest.raises(Unavailable):
            await KeyValue(bus, NOTES, budget_s=0.2).get("k")
