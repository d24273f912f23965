"""Many sandboxes at once, and the nodes that do not answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec import (
    DeathReason,
    DSecClient,
    InvalidArgument,
    SandboxDead,
)
from libdsec.bus import Call
from libdsec.wire.node import NodeState
from libdsec.wire.sandbox import PauseResult, PauseSandbox, State
from libdsec.wire.subjects import PAUSE
from tests.world.memory import MemoryServer, memory_bus
from tests.world.world import World, replace


@pytest.fixture
async def three(
    tmp_path: Path, memory: MemoryServer, unconfigured: Path
) -> AsyncIterator[tuple[World, DSecClient]]:
    """Three nodes with two sandboxes of job `a` each and one of job `b`."""
    world = await World(tmp_path / "three", nodes=3).start(lambda name: memory_bus(memory, name))
    async with DSecClient(["memory://"]) as client:
        await client.create_many(6, image="busybox", labels={"job": "a"})
        await client.create_many(3, image="busybox", labels={"job": "b"})
        yield world, client
    await world.close()


Three = tuple[World, DSecClient]


async def test_list_gathers_from_every_node(three: Three) -> None:
    _, client = three
    listing = client.list(labels={"job": "a"})
    found = [info async for info in listing]
    assert sorted(info.node for info in found) == ["n1", "n1", "n2", "n2", "n3", "n3"]
    assert [i.created_at for i in found] == sorted(i.created_at for i in found)
    assert listing.coverage.answered == {"n1", "n2", "n3"}
    assert not listing.coverage.missing
    some = client.list(limit=2)
    assert len([info async for info in some]) == 2
    assert some.coverage.dropped == 7


async def test_list_names_who_did_not_answer(three: Three) -> None:
    world, client = three
    for serving in world.buses[1].servings:
        if serving.template.endswith("edges.list"):
            await serving.stop()
    world.scheduler.states["n3"] = NodeState.LOST
    listing = client.list(timeout=0.3)
    found = [info async for info in listing]
    assert {info.node for info in found} >= {"n1"}
    assert listing.coverage.missing == {"n2", "n3"}
    assert listing.coverage.nodes_known


async def test_list_without_a_scheduler_says_that_it_cannot_know(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, client = three
    monkeypatch.setattr("libdsec.selection._NODES_S", 0.1)
    await world.buses[-1].close()
    listing = client.list(timeout=0.3)
    assert len([info async for info in listing]) == 9
    assert not listing.coverage.nodes_known


async def test_many_by_label_touch_only_their_own(three: Three) -> None:
    world, client = three
    dry = await client.pause_many(labels={"job": "a"}, dry_run=True)
    assert len(dry.done) == 6
    assert not paused(world)
    done = await client.pause_many(labels={"job": "a"})
    assert set(done.done) == paused(world) == set(dry.done)
    assert done.coverage.answered == {"n1", "n2", "n3"}
    await client.resume_many(labels={"job": "a"})
    assert not paused(world)
    stopped = await client.stop_many(labels={"job": "b"})
    assert len(stopped.done) == 3
    assert len([info async for info in client.list()]) == 6


async def test_many_with_a_limit_take_that_many_over_all_nodes(three: Three) -> None:
    world, client = three
    dry = await client.pause_many(labels={}, limit=4, dry_run=True)
    assert len(dry.done) == 4
    assert not paused(world)
    done = await client.pause_many(labels={}, limit=4)
    assert paused(world) == set(done.done) == set(dry.done)
    assert done.coverage.dropped == 5
    with pytest.raises(InvalidArgument, match="limit"):
        await client.stop_many(labels={}, limit=0)


async def test_many_keep_each_failure_with_its_id(three: Three) -> None:
    world, client = three

    async def die(message: PauseSandbox, call: Call) -> PauseResult:
        raise SandboxDead("gone", reason=DeathReason.KILLED)

    await replace(world, PAUSE, die)
    done = await client.pause_many(labels={"job": "a"}, limit=100)
    assert set(done.done) == paused(world)
    assert {sandbox_id.partition("_")[0] for sandbox_id in done.failed} == {"n1"}
    assert (len(done.done), len(done.failed)) == (4, 2)


def paused(world: World) -> set[str]:
    return {
        sandbox_id
        for edge in world.edges
        for sandbox_id, box in edge.boxes.items()
        if box.info.state is State.PAUSED
    }


async def test_nodes_and_queue(three: Three) -> None:
    _, client = three
    assert [view.heartbeat.node for view in await client.nodes()] == ["n1", "n2", "n3"]
    assert [lane.waiting for lane in await client.queue()] == [3]
