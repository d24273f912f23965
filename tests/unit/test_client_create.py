"""`create` and `create_many` against a scheduler that says what a test wants it to say."""

from __future__ import annotations

import asyncio
import time

import pytest

from libdsec import (
    Conflict,
    DeadlineExceeded,
    DSecClient,
    InvalidArgument,
    NoCapacity,
    NotFound,
    PermissionDenied,
    Progress,
    QuotaExceeded,
    Sandbox,
    Unavailable,
    placing,
)
from libdsec.bus import Call
from libdsec.wire.envelope import H_BUDGET_MS, H_REQUEST_ID, H_TRACEPARENT
from libdsec.wire.placement import PlaceRequest
from libdsec.wire.sandbox import State
from tests.world.memory import MemoryServer
from tests.world.world import World


async def test_create_waits_in_the_lane_of_its_class_and_project(
    world: World, client: DSecClient, server: MemoryServer
) -> None:
    sandbox = await client.create(image="busybox", qos="latency-sensitive", labels={"job": "j1"})
    [subject] = [s for s, _, _ in server.published if ".place." in s]
    assert subject.startswith("dsec.v1.p.default.place.ls.container.")
    assert sandbox.id in world.edge.boxes
    assert (sandbox.node, sandbox.labels) == ("n1", {"job": "j1"})
    assert sandbox.phases_ms == {"queued": 1.0, "start": 2.0}


async def test_create_is_one_trace_and_one_request(
    world: World, client: DSecClient, server: MemoryServer
) -> None:
    sandbox = await client.create(image="busybox")
    [headers] = [h for s, h, _ in server.published if ".place." in s]
    [request] = world.scheduler.requests
    assert headers[H_REQUEST_ID] == request.request_id == sandbox.request_id
    await client.close()
    [root] = [span for span in world.edge.spans if span.name == "create"]
    assert root.trace_id == headers[H_TRACEPARENT].split("-")[1]
    assert root.span_id == headers[H_TRACEPARENT].split("-")[2]
    assert root.parent_id == ""
    assert root.attributes["messaging.message.conversation_id"] == sandbox.request_id


async def test_create_with_the_same_key_gives_the_same_sandbox(client: DSecClient) -> None:
    first = await client.create(image="busybox", idempotency_key="a key: with/anything")
    again = await client.create(image="busybox", idempotency_key="a key: with/anything")
    assert first.id == again.id
    with pytest.raises(Conflict):
        await client.create(image="busybox", pids=99, idempotency_key="a key: with/anything")


async def test_create_names_the_layer_that_is_not_there(client: DSecClient) -> None:
    with pytest.raises(NotFound, match="missing") as caught:
        await client.create(image="missing")
    assert caught.value.request_id
    assert len(caught.value.trace_id) == 32
    assert "layers list" in caught.value.hint


async def test_create_tells_why_it_waits(world: World, client: DSecClient) -> None:
    async def waits(request: PlaceRequest, call: Call) -> None:
        await world.scheduler.tell(request, "no node has room", position=3)
        await world.scheduler.place_all(request, call)

    world.scheduler.place = waits
    heard: list[Progress] = []
    await client.create(image="busybox", on_progress=heard.append)
    assert [(p.reason, p.position) for p in heard] == [("no node has room", 3)]


async def test_create_that_times_out_says_why_and_cancels(world: World, client: DSecClient) -> None:
    async def never(request: PlaceRequest, call: Call) -> None:
        await world.scheduler.tell(
            request, "no node fits: memory 4", position=2, dropped_by_filter={"memory": 4}
        )

    world.scheduler.place = never
    with pytest.raises(DeadlineExceeded, match="no node fits") as caught:
        await client.create(image="busybox", timeout=0.3, idempotency_key="k")
    assert "position 2" in caught.value.message
    assert "memory 4" in caught.value.message
    await client.close()
    [cancel] = world.scheduler.cancelled
    assert (cancel.key, cancel.request_id) == ("k", caught.value.request_id)


async def test_create_cancelled_by_its_caller_cancels_the_request(
    world: World, client: DSecClient
) -> None:
    queued = asyncio.Event()

    async def never(request: PlaceRequest, call: Call) -> None:
        queued.set()

    world.scheduler.place = never
    task = asyncio.create_task(client.create(image="busybox"))
    await queued.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.close()
    assert len(world.scheduler.cancelled) == 1


async def test_a_sandbox_announced_after_the_caller_gave_up_is_stopped(
    world: World, client: DSecClient
) -> None:
    late: list[str] = []
    done = asyncio.Event()

    async def announce(request: PlaceRequest) -> None:
        while not world.scheduler.cancelled:
            await asyncio.sleep(0.01)
        late.append(world.edge.accept(request.spec, client.project, request.request_id))
        await world.scheduler.announce(request, {0: late[0]})
        done.set()

    async def too_late(request: PlaceRequest, call: Call) -> None:
        background.append(asyncio.create_task(announce(request)))

    background: list[asyncio.Task[None]] = []
    world.scheduler.place = too_late
    with pytest.raises(DeadlineExceeded):
        await client.create(image="busybox", timeout=0.2)
    await done.wait()
    await client.close()
    assert world.edge.boxes[late[0]].info.state is State.DEAD


async def test_create_many_is_one_message_and_keeps_failures_in_place(
    world: World, client: DSecClient
) -> None:
    async def one_fails(request: PlaceRequest, call: Call) -> None:
        ids = {
            index: world.edge.accept(request.spec, call.project, request.request_id)
            for index in (0, 1, 3)
        }
        await world.scheduler.announce(request, ids, {2: NoCapacity("no room for this one")})

    world.scheduler.place = one_fails
    made = await client.create_many(4, image="busybox")
    assert [isinstance(item, Sandbox) for item in made] == [True, True, False, True]
    failed = made[2]
    assert isinstance(failed, NoCapacity)
    assert failed.request_id
    assert failed.trace_id
    assert len(world.scheduler.requests) == 1


async def test_create_many_larger_than_a_message_is_several_with_a_key_each(
    world: World, client: DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libdsec.client.CREATE_MANY_MESSAGE", 4)
    made = await client.create_many(10, image="busybox", idempotency_key="job")
    assert len({item.id for item in made if isinstance(item, Sandbox)}) == 10
    asked = sorted((r.key, r.count) for r in world.scheduler.requests)
    assert asked == [("job-0", 4), ("job-1", 4), ("job-2", 2)]
    assert len({r.request_id for r in world.scheduler.requests}) == 3


async def test_create_many_that_runs_out_of_time_keeps_what_is_ready(
    world: World, client: DSecClient
) -> None:
    async def half(request: PlaceRequest, call: Call) -> None:
        ready = world.edge.accept(request.spec, call.project, request.request_id)
        await world.scheduler.announce(request, {1: ready})

    world.scheduler.place = half
    made = await client.create_many(2, image="busybox", timeout=0.2)
    assert isinstance(made[0], DeadlineExceeded)
    assert isinstance(made[1], Sandbox)
    await client.close()
    assert world.edge.boxes[made[1].id].info.state is State.READY


async def test_announcements_may_come_twice_and_foreign_ones_are_dropped(
    world: World, client: DSecClient
) -> None:
    async def twice(request: PlaceRequest, call: Call) -> None:
        sandbox_id = world.edge.accept(request.spec, call.project, request.request_id)
        await world.scheduler.announce(request, {0: "forged_aaaaaa_aaaaaaaaaaaa"}, nonce="guess")
        await world.scheduler.announce(request, {0: sandbox_id, 7: sandbox_id})
        await world.scheduler.announce(request, {0: sandbox_id})

    world.scheduler.place = twice
    sandbox = await client.create(image="busybox")
    assert sandbox.id in world.edge.boxes


async def test_a_full_queue_is_quota_exceeded_at_once(
    client: DSecClient, server: MemoryServer
) -> None:
    server.stream_error = {"code": 503, "err_code": 10077, "description": "maximum messages"}
    with pytest.raises(QuotaExceeded) as caught:
        await client.create(image="busybox", timeout=30)
    assert caught.value.retry_after_s is not None
    assert caught.value.retryable


async def test_another_projects_lane_is_permission_denied(
    client: DSecClient, server: MemoryServer
) -> None:
    server.denied = ("dsec.v1.p.default.place.>",)
    with pytest.raises(PermissionDenied, match="place"):
        await client.create(image="busybox", timeout=30)


async def test_create_without_a_bus_fails_within_its_budget(
    client: DSecClient, server: MemoryServer
) -> None:
    await client.open()
    server.cut()
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await client.create(image="busybox", timeout=0.5)
    assert time.monotonic() - began < 5
    assert caught.value.request_id


async def test_create_goes_on_when_the_bus_comes_back(
    world: World, client: DSecClient, server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "_REPEAT_S", 0.05)
    taken = asyncio.Event()

    async def lost(request: PlaceRequest, call: Call) -> None:
        # Placed, but the connection breaks before the announcement gets through.
        world.scheduler.place = world.scheduler.place_all
        server.cut()
        await world.scheduler.place_all(request, call)
        taken.set()

    world.scheduler.place = lost
    creating = asyncio.create_task(client.create(image="busybox"))
    while not taken.is_set() and not creating.done():
        await asyncio.sleep(0.01)
        server.restore()
    sandbox = await creating
    assert list(world.edge.boxes) == [sandbox.id]  # asked twice under one key: one sandbox
    first, second, *_ = world.scheduler.requests
    assert (first.key, first.reply_to, first.nonce) == (second.key, second.reply_to, second.nonce)
    assert second.budget_ms <= first.budget_ms


async def test_an_error_in_the_progress_callback_reaches_the_caller_and_cancels(
    world: World, client: DSecClient
) -> None:
    async def tells(request: PlaceRequest, call: Call) -> None:
        await world.scheduler.tell(request, "waiting")

    def breaks(progress: Progress) -> None:
        raise ZeroDivisionError

    world.scheduler.place = tells
    with pytest.raises(ZeroDivisionError):
        await client.create(image="busybox", on_progress=breaks)
    await client.close()
    assert world.scheduler.cancelled


async def test_what_can_never_work_is_not_sent(
    world: World, client: DSecClient, server: MemoryServer
) -> None:
    with pytest.raises(InvalidArgument, match="backend") as caught:
        await client.create(image="busybox", backend="docker")
    assert caught.value.request_id
    assert "container, microvm, vm" in caught.value.hint
    with pytest.raises(InvalidArgument, match="timeout"):
        await client.create(image="busybox", timeout=0)
    with pytest.raises(InvalidArgument, match="count"):
        await client.create_many(0, image="busybox")
    assert not [s for s, _, _ in server.published if ".place." in s]


async def test_the_stated_budget_is_the_remainder(
    world: World, client: DSecClient, server: MemoryServer
) -> None:
    await client.create(image="busybox", timeout=7)
    [request] = world.scheduler.requests
    assert 6000 < request.budget_ms <= 7000
    [headers] = [h for s, h, _ in server.published if ".place." in s]
    assert headers["Nats-TTL"] == "7s"
    assert 6000 < int(headers[H_BUDGET_MS]) <= 7000
