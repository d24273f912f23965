"""Who may say and hear what on the bus: the generated configuration against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from libdsec.wire import subjects
from services.stack.nats_config import hub_config, leaf_config
from services.stack.users import Role, User
from tests.integration.servers import free_port

ALICE = User("alice", Role.CALLER, "team-a", "alice-password")
MALLORY = User("mallory", Role.CALLER, "team-m", "mallory-password")
OPERATOR = User("op", Role.OPERATOR, "ops", "operator-password")
SCHEDULER = User("scheduler", Role.SERVICE, "dsec", "scheduler-password")
NODE = User("node-n1", Role.NODE, "dsec", "node-password", "n1")
EDGE = User("edge-n1", Role.NODE_SERVICE, "dsec", "edge-password", "n1")


@dataclass
class Peer:
    """A connection and the permission errors the server reported to it."""

    client: Client
    refused: list[str] = field(default_factory=list)

    async def settled(self) -> list[str]:
        await self.client.flush()
        await self.client.flush()
        return self.refused


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """A hub and a leaf from the configuration that `dsec up` writes; (hub port, leaf port)."""
    home = tmp_path_factory.mktemp("bus")
    hub, hub_http, leafs, leaf, leaf_http = (free_port() for _ in range(5))
    people = [ALICE, MALLORY, OPERATOR, SCHEDULER, NODE]
    (home / "hub.conf").write_text(
        hub_config(people, port=hub, leaf_port=leafs, http_port=hub_http, store=home / "js")
    )
    (home / "leaf.conf").write_text(
        leaf_config(NODE, [EDGE], port=leaf, leaf_port=leafs, http_port=leaf_http)
    )
    server = str(Path(sys.executable).parent / "nats-server")
    with contextlib.ExitStack() as stack:
        for name in ("hub", "leaf"):
            log = stack.enter_context((home / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                [server, "-c", str(home / f"{name}.conf")], stdout=log, stderr=log
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
        yield hub, leaf


async def connect(port: int, user: User) -> Peer:
    refused: list[str] = []

    async def on_error(err: Exception) -> None:
        refused.append(str(err))

    async with asyncio.timeout(10):
        while True:
            try:
                client = await nats.connect(
                    f"nats://127.0.0.1:{port}", user=user.name, password=user.password,
                    inbox_prefix=user.inbox_prefix, error_cb=on_error, allow_reconnect=False,
                )  # fmt: skip
                return Peer(client, refused)
            except OSError:
                await asyncio.sleep(0.02)


@pytest.fixture
async def peers(ports: tuple[int, int]) -> AsyncIterator[dict[str, Peer]]:
    hub, leaf = ports
    found = {u.name: await connect(hub, u) for u in (ALICE, MALLORY, OPERATOR, SCHEDULER)}
    found["edge"] = await connect(leaf, EDGE)
    await leaf_is_joined(found["scheduler"].client, found["edge"].client)
    yield found
    for peer in found.values():
        await peer.client.close()


async def answer(message: Msg) -> None:
    await message.respond(message.subject.encode())


async def leaf_is_joined(trusted: Client, edge: Client) -> None:
    """The leaf connects by itself, with pauses; ask until an answer comes through it."""
    subject = subjects.OFFER.subject(node="n1")
    sub = await edge.subscribe(subject, cb=answer)
    async with asyncio.timeout(15):
        while True:
            with contextlib.suppress(NoRespondersError, TimeoutError):
                await trusted.request(subject, b"", timeout=0.5)
                break
            await asyncio.sleep(0.05)
    await sub.unsubscribe()


async def test_caller_reaches_its_own_edge_through_the_leaf(peers: dict[str, Peer]) -> None:
    subject = subjects.INFO.subject(project="team-a", node="n1")
    await peers["edge"].client.subscribe(subjects.INFO.subject(node="n1"), cb=answer)
    await peers["edge"].client.flush()
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(NoRespondersError):
                reply = await peers["alice"].client.request(subject, b"", timeout=2)
                break
            await asyncio.sleep(0.02)
    assert reply.data == subject.encode()


@pytest.mark.parametrize(
    "subject",
    [
        subjects.INFO.subject(project="team-a", node="n1"),
        subjects.lane_subject("team-a", *next(iter(subjects.LANES))),
        subjects.OFFER.subject(node="n1"),
        subjects.HEARTBEAT.subject(node="n1"),
        subjects.DLQ_DISCARD.subject(),
        subjects.NODE_DRAIN.subject(node="n1"),
        "$JS.API.STREAM.DELETE.PLACEMENTS",
        f"$KV.{subjects.CLAIMS.name}.team-m.x",
        "_INBOX.team-a.alice.guess",
    ],
)
async def test_server_refuses_what_is_not_the_callers(peers: dict[str, Peer], subject: str) -> None:
    heard: list[str] = []

    async def listen(message: Msg) -> None:
        heard.append(message.subject)

    watcher = await peers["scheduler"].client.subscribe("dsec.v1.>", cb=listen)
    await peers["scheduler"].client.flush()
    await peers["mallory"].client.publish(subject, b"x")
    refused = await peers["mallory"].settled()
    await peers["scheduler"].client.flush()
    await watcher.unsubscribe()
    assert any("permissions violation" in text.lower() for text in refused)
    assert subject not in heard


@pytest.mark.parametrize(
    "subject", ["_INBOX.team-a.alice.>", "_INBOX.>", "dsec.v1.>", "dsec.v1.p.team-m.>"]
)
async def test_caller_hears_only_its_own_inbox(peers: dict[str, Peer], subject: str) -> None:
    await peers["mallory"].client.subscribe(subject)
    refused = await peers["mallory"].settled()
    assert any("permissions violation" in text.lower() for text in refused)


async def test_node_cannot_speak_for_another_node(peers: dict[str, Peer]) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def listen(message: Msg) -> None:
        heard.put_nowait(message.subject)

    await peers["scheduler"].client.subscribe(subjects.HEARTBEAT.subject(), cb=listen)
    await peers["scheduler"].client.flush()
    own = subjects.HEARTBEAT.subject(node="n1")
    async with asyncio.timeout(10):
        while True:  # the interest travels to the leaf by itself
            await peers["edge"].client.publish(subjects.HEARTBEAT.subject(node="n2"), b"forged")
            await peers["edge"].client.publish(own, b"true")
            await peers["edge"].client.flush()
            with contextlib.suppress(TimeoutError):
                first = await asyncio.wait_for(heard.get(), 0.2)
                break
    assert first == own


async def test_node_writes_layer_names_and_only_those(peers: dict[str, Peer]) -> None:
    trusted = peers["scheduler"].client.jetstream()
    await trusted.create_key_value(bucket=subjects.LAYERS.name)
    await trusted.create_key_value(bucket=subjects.CLAIMS.name)
    edge = peers["edge"].client.jetstream(timeout=2)
    layers = await edge.key_value(subjects.LAYERS.name)
    await layers.create("public.x.1", b"layer")
    claims = await edge.key_value(subjects.CLAIMS.name)
    with pytest.raises(Exception, match=r"(?i)no response|timeout|no responders"):
        await claims.put("team-a.key", b"stolen")
    assert (await (await trusted.key_value(subjects.LAYERS.name)).get("public.x.1")).value
    with pytest.raises(Exception, match=r"(?i)not found"):
        await (await trusted.key_value(subjects.CLAIMS.name)).get("team-a.key")
