"""What may happen to the connection: no server, refusals, outages, restarts, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from libdsec.bus import Bus, BusObserver, Call
from libdsec.errors import DeadlineExceeded, PermissionDenied, Unavailable
from libdsec.wire import subjects
from libdsec.wire.envelope import Event, Rpc
from libdsec.wire.model import Empty

from .conftest import Connect
from .servers import NatsServer, free_port

PING = Rpc("t.ping", Empty, Empty, "the test's server")
TICK = Event("t.tick", Empty)

USERS = """
authorization { users = [
  { user: p1, password: pw, permissions: {
      publish: ["dsec.v1.p.p1.>"], subscribe: ["_INBOX.p1.>"] } }
  { user: edge, password: pw }
] }
"""


class Watched(BusObserver):
    """Remembers what it is told, and lets a test wait for it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []
        self._changed = asyncio.Event()

    def _note(self, *fact: str) -> None:
        self.seen.append(fact)
        self._changed.set()

    def connected(self) -> None:
        self._note("connected")

    def disconnected(self) -> None:
        self._note("disconnected")

    def closed(self) -> None:
        self._note("closed")

    def lame_duck(self) -> None:
        self._note("lame_duck")

    def slow_consumer(self, subject: str) -> None:
        self._note("slow_consumer", subject)

    def denied(self, operation: str, subject: str) -> None:
        self._note("denied", operation, subject)

    async def until(self, *fact: str, times: int = 1) -> None:
        async with asyncio.timeout(10):
            while self.seen.count(fact) < times:
                self._changed.clear()
                await self._changed.wait()


async def pong(request: Empty, call: Call) -> Empty:
    return Empty()


async def test_no_server_is_an_error_within_the_time_given() -> None:
    port = free_port()
    url = f"nats://me:hunter2@127.0.0.1:{port}"
    async with asyncio.timeout(2):
        with pytest.raises(Unavailable, match="no NATS server answered") as caught:
            await Bus.connect([url], name="t", connect_timeout_s=0.3)
    assert f"nats://127.0.0.1:{port}" in caught.value.hint
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("nats_config", [USERS])
async def test_wrong_credentials_are_refused_at_once(connect: Connect) -> None:
    async with asyncio.timeout(2):
        with pytest.raises(PermissionDenied, match="refused the credentials"):
            await connect(user="p1", password="wrong", connect_timeout_s=30)


@pytest.mark.parametrize("nats_config", [USERS])
async def test_an_inbox_outside_the_permissions_is_refused_at_connect(connect: Connect) -> None:
    with pytest.raises(PermissionDenied, match="subscribe to _inbox"):
        await connect(user="p1", password="pw", inbox_prefix="_INBOX.p2")


@pytest.mark.parametrize("nats_config", [USERS])
async def test_a_forbidden_request_fails_long_before_its_budget(connect: Connect) -> None:
    client = await connect(user="p1", password="pw", inbox_prefix="_INBOX.p1")
    async with asyncio.timeout(1):
        with pytest.raises(PermissionDenied, match=r"publish to dsec\.v1\.p\.p2\.nodes"):
            await client.request(subjects.NODES, Empty(), budget_s=30, project="p2")


@pytest.mark.parametrize("nats_config", [USERS])
async def test_a_forbidden_publish_is_raised_when_confirmed_and_counted_when_not(
    connect: Connect,
) -> None:
    observer = Watched()
    client = await connect(user="p1", password="pw", inbox_prefix="_INBOX.p1", observer=observer)
    with pytest.raises(PermissionDenied):
        await client.publish(TICK, Empty(), confirm=True)
    await client.publish(TICK, Empty())
    await observer.until("denied", "publish", "t.tick", times=2)


@pytest.mark.parametrize("nats_config", [USERS])
async def test_serving_a_forbidden_subject_is_refused(connect: Connect) -> None:
    client = await connect(user="p1", password="pw", inbox_prefix="_INBOX.p1")
    with pytest.raises(PermissionDenied, match=r"subscribe to t\.ping"):
        await client.serve(PING, pong)
    assert client.ready


async def test_a_request_in_flight_when_the_server_dies_fails_at_once_and_later_ones_wait(
    nats_server: NatsServer, connect: Connect
) -> None:
    observer = Watched()
    server, client = await connect("server"), await connect("client", observer=observer)
    entered = asyncio.Event()

    async def once_stuck(request: Empty, call: Call) -> Empty:
        if not entered.is_set():
            entered.set()
            await asyncio.Event().wait()
        return Empty()

    await server.serve(PING, once_stuck)
    stuck = asyncio.create_task(client.request(PING, Empty(), budget_s=60))
    await entered.wait()
    nats_server.kill()
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match="may have been carried out"):
            await stuck
    assert not client.ready
    waiting = asyncio.create_task(client.request(PING, Empty(), budget_s=20))
    nats_server.start()
    await observer.until("connected", times=2)
    # The server's side may come back a moment later than ours.
    with contextlib.suppress(Unavailable):
        await waiting
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(Unavailable):
                await client.request(PING, Empty(), budget_s=5)
                break
    assert client.ready


async def test_nothing_is_buffered_during_an_outage(
    nats_server: NatsServer, connect: Connect
) -> None:
    observer = Watched()
    client = await connect(observer=observer)
    received: list[Empty] = []

    async def take(event: Empty, call: Call) -> None:
        received.append(event)

    await client.subscribe(TICK, take)
    nats_server.kill()
    await observer.until("disconnected")
    with pytest.raises(Unavailable, match="is lost"):
        await client.publish(TICK, Empty())
    with pytest.raises(Unavailable, match="has not come back in time"):
        await client.request(PING, Empty(), budget_s=0.1)
    assert client.nats.pending_data_size == 0
    nats_server.start()
    await observer.until("connected", times=2)
    await client.flush()
    assert received == []


async def test_an_outage_of_any_length_is_survived(
    nats_server: NatsServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libdsec._bus.link._RECONNECT_WAIT_S", 0.01)
    observer = Watched()
    client = await connect(observer=observer)
    nats_server.kill()
    async with asyncio.timeout(10):
        while client.nats.server_pool[0].reconnects < 70:  # its own default: 60
            await asyncio.sleep(0.01)
    nats_server.start()
    await observer.until("connected", times=2)
    assert ("closed",) not in observer.seen


async def test_drain_ends_the_bus_while_the_server_is_away(
    nats_server: NatsServer, connect: Connect
) -> None:
    observer = Watched()
    client = await connect(observer=observer)
    await client.serve(PING, pong)
    nats_server.kill()
    await observer.until("disconnected")
    async with asyncio.timeout(5):
        await client.drain(timeout_s=2)
        await client.wait_closed()
    with pytest.raises(Unavailable, match="closed"):
        await client.request(PING, Empty(), budget_s=5)


async def test_a_closed_bus_has_really_stopped_connecting(
    nats_server: NatsServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed at the moment an attempt is refused, the library would lose the cancellation."""
    monkeypatch.setattr("libdsec._bus.link._RECONNECT_WAIT_S", 0.0001)
    buses = [await connect(f"bus{n}") for n in range(40)]
    nats_server.kill()
    for bus in buses:
        await asyncio.sleep(0)
        await bus.close()
    left = [task for task in asyncio.all_tasks() if "reconnect" in str(task.get_coro())]
    assert left == []


async def test_a_closed_connection_wakes_whoever_waits_for_it(connect: Connect) -> None:
    observer = Watched()
    client = await connect(observer=observer)
    waiting = asyncio.create_task(client.wait_closed())
    await client.close()
    async with asyncio.timeout(2):
        await waiting
    assert ("closed",) in observer.seen


async def test_an_unanswered_ping_does_not_deafen_the_connection(
    nats_server: NatsServer, connect: Connect
) -> None:
    client = await connect()
    await client.serve(PING, pong)
    nats_server.freeze()
    with pytest.raises(Unavailable, match="did not answer a ping"):
        await client.flush(timeout_s=0.1)
    nats_server.thaw()
    # The late pong must find its future alive: a cancelled one kills the client's read loop.
    assert await client.request(PING, Empty(), budget_s=5) == Empty()


async def test_events_over_the_bound_are_dropped_and_counted(connect: Connect) -> None:
    dropped: list[tuple[str, str]] = []
    observer = BusObserver()
    observer.dropped = lambda template, reason: dropped.append((template, reason))  # type: ignore[method-assign]
    client = await connect(observer=observer)
    release, handled = asyncio.Event(), []

    async def slow(event: Empty, call: Call) -> None:
        await release.wait()
        handled.append(event)

    serving = await client.subscribe(TICK, slow, concurrency=1, backlog=2)
    for _ in range(10):
        await client.publish(TICK, Empty())
    await client.flush()
    while len(dropped) < 7:
        await asyncio.sleep(0)
    release.set()
    await serving.stop()
    assert dropped == [("t.tick", "busy")] * 7
    assert len(handled) == 3


async def test_events_keep_their_order_with_one_handler(connect: Connect) -> None:
    client = await connect()
    numbered = Event("t.numbered.{tail}", Empty)
    order: list[str] = []
    done = asyncio.Event()

    async def take(event: Empty, call: Call) -> None:
        await asyncio.sleep(0)
        order.append(call.tail)
        if len(order) == 50:
            done.set()

    await client.subscribe(numbered, take, concurrency=1)
    for n in range(50):
        await client.publish(numbered, Empty(), tail=str(n))
    await asyncio.wait_for(done.wait(), 5)
    assert order == [str(n) for n in range(50)]


async def test_a_slow_consumer_is_reported(connect: Connect) -> None:
    observer = Watched()
    client = await connect(observer=observer)
    never = asyncio.Event()

    async def block(msg: object) -> None:
        await never.wait()

    await client.nats.subscribe("t.slow", cb=block, pending_msgs_limit=1)
    for _ in range(5):
        await client.nats.publish("t.slow", b"x")
    await observer.until("slow_consumer", "t.slow", times=2)


async def test_lame_duck_mode_moves_to_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libdsec._bus.link._LAME_DUCK_GRACE_S", 0.05)
    cluster = [free_port(), free_port()]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in cluster)
    servers = [
        NatsServer(
            tmp_path / str(n),
            jetstream=False,
            config=f"cluster {{ name: c, host: 127.0.0.1, port: {port}, routes: [{routes}] }}\n"
            'lame_duck_duration: "30s"\nlame_duck_grace_period: "1s"\n',
        ).start()
        for n, port in enumerate(cluster)
    ]
    observer = Watched()
    try:
        bus = await Bus.connect([servers[0].url], name="t", observer=observer)
        async with asyncio.timeout(10):
            while len(bus.nats.servers) < 2:  # the server gossips its peers
                await bus.flush()
                await asyncio.sleep(0.05)
        servers[0].signal(signal.SIGUSR2)
        await observer.until("lame_duck")
        await observer.until("connected", times=2)
        url = bus.nats.connected_url
        assert url is not None
        assert url.port == servers[1].port
        with pytest.raises(Unavailable, match="nobody answers"):
            await bus.request(PING, Empty(), budget_s=5)
        await bus.close()
    finally:
        for server in servers:
            server.terminate()


async def test_a_late_reply_is_nobodys(connect: Connect) -> None:
    client = await connect()
    asked: asyncio.Queue[Msg] = asyncio.Queue()
    await client.nats.subscribe(PING.template, cb=asked.put)
    await client.flush()
    with pytest.raises(DeadlineExceeded):
        await client.request(PING, Empty(), budget_s=0.05)
    late = await asked.get()
    again = asyncio.create_task(client.request(PING, Empty(), budget_s=5))
    current = await asked.get()
    for msg in (late, current):
        assert msg.headers is not None
        await client.nats.publish(msg.reply, b"{}", headers=msg.headers)
    assert await again == Empty()
