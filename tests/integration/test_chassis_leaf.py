"""A service behind a leaf server without JetStream uses the hub's streams and buckets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from libdsec.bus import Bus, Call
from libdsec.errors import Unavailable
from libdsec.wire.envelope import Bucket, Durable, Event, Rpc, Stream
from libdsec.wire.model import Empty, Message
from services.chassis.consumer import Consumer
from services.chassis.kv import KeyValue
from services.chassis.kv_watch import watch
from services.chassis.topology import ensure_topology

from .servers import NatsServer, free_port


class Note(Message):
    text: str


NOTES = Bucket("NOTES", Note)
HAPPENED = Event("t.node.{node}.happened", Note)
EVENTS = Stream(
    "EVENTS", ("t.node.*.happened",), work_queue=False, max_age_s=600, max_bytes=1 << 20,
    max_msgs=100, discard_new=False,
)  # fmt: skip
READER = Durable("reader", EVENTS, "t.node.*.happened", 5, -1, 10)
LOCAL = Rpc("t.node.{node}.local", Empty, Empty, "the node's own service")


@dataclass
class Pair:
    hub: NatsServer
    leaf: NatsServer


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    leaf_port = free_port()
    hub = NatsServer(
        tmp_path / "hub", domain="hub", config=f"leafnodes {{ listen: 127.0.0.1:{leaf_port} }}\n"
    ).start()
    remotes = f'{{ url: "nats-leaf://127.0.0.1:{leaf_port}", account: N }}'
    leaf = NatsServer(
        tmp_path / "leaf",
        jetstream=False,
        config=f"leafnodes {{ reconnect: 1s, remotes: [{remotes}] }}\n"
        "accounts { N { users: [{ user: n, password: n }] } }\n"
        "default_js_domain: { N: hub }\n",
    ).start()
    yield Pair(hub, leaf)
    leaf.terminate()
    hub.terminate()


@pytest.fixture
async def buses(pair: Pair) -> AsyncIterator[tuple[Bus, Bus]]:
    hub = await Bus.connect([pair.hub.url], name="hub")
    node = await Bus.connect([pair.leaf.url], name="node", user="n", password="n")
    await ensure_topology(hub, streams=[EVENTS], durables=[READER], buckets=[NOTES])
    async with asyncio.timeout(10):  # the leaf's link to the hub comes up on its own
        while True:
            with contextlib.suppress(Unavailable):
                await KeyValue(node, NOTES).get("k")
                break
    yield hub, node
    await node.close()
    await hub.close()


async def test_a_node_reads_writes_and_watches_the_hubs_buckets(buses: tuple[Bus, Bus]) -> None:
    hub, node = buses
    here, there = KeyValue(node, NOTES), KeyValue(hub, NOTES)
    await there.put("k", Note(text="from the hub"))
    entry = await here.get("k")
    assert entry is not None
    await here.update("k", Note(text="from the node"), entry.revision)
    async with contextlib.aclosing(watch(node, here)) as changes:
        assert (await anext(changes)).value == Note(text="from the node")
        await there.put("k", Note(text="again"))
        assert (await anext(changes)).value == Note(text="again")


async def test_what_a_node_publishes_is_stored_and_consumed_at_the_hub(
    buses: tuple[Bus, Bus],
) -> None:
    _, node = buses
    ack = await node.stream_publish(HAPPENED, Note(text="x"), msg_id="1", node="n1")
    assert ack.stream == "EVENTS"
    async with Consumer(node, READER, HAPPENED) as consumer:
        (delivery,) = await consumer.fetch(1, wait_s=2)
        assert (delivery.message.text, delivery.call.node) == ("x", "n1")
        await delivery.ack()


async def test_local_services_reach_each_other_while_the_hub_is_away(
    pair: Pair, buses: tuple[Bus, Bus]
) -> None:
    _, node = buses

    async def answer(request: Empty, call: Call) -> Empty:
        return Empty()

    await node.serve(LOCAL, answer, node="n1")
    pair.hub.kill()
    assert await node.request(LOCAL, Empty(), budget_s=5, node="n1") == Empty()
    with pytest.raises(Unavailable):
        await node.stream_publish(HAPPENED, Note(text="x"), msg_id="2", node="n1", budget_s=1)
    pair.hub.start()
    async with asyncio.timeout(15):
        while True:
            with contextlib.suppress(Unavailable):
                await node.stream_publish(HAPPENED, Note(text="x"), msg_id="2", node="n1")
                break
            await asyncio.sleep(0.05)
