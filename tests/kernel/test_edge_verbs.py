"""An edge asked over the bus: every verb, every refusal, and what is told to whom."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from libdsec.errors import (
    Conflict,
    DataLoss,
    InvalidArgument,
    NoCapacity,
    NotFound,
    Unavailable,
    Unsupported,
)
from libdsec.wire import subjects
from libdsec.wire.model import Message
from libdsec.wire.placement import Announcement, WhoHas
from libdsec.wire.sandbox import (
    ById,
    ExtendSandbox,
    Lifetime,
    NetworkAllow,
    NetworkNone,
    PolicySpec,
    Resources,
    Selection,
    SetNetwork,
    SetPhase,
    State,
)
from libdsec.wire.trace import SpanRecord, TraceQuery

from .edge_process import PROJECT, EdgeWorld, edge_world

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root"),
    pytest.mark.skipif(shutil.which("crun") is None, reason="crun is not installed"),
]

ALLOW = PolicySpec(network=NetworkAllow(rules=("tcp:10.0.0.5:443",)))


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as world:
        await world.start()
        yield world


async def ask(world: EdgeWorld, rpc: Any, message: Message, project: str = PROJECT) -> Any:
    return await world.bus.request(rpc, message, project=project, node=world.node, budget_s=15)


async def test_a_network_is_replaced_wholly_and_phases_are_named(world: EdgeWorld) -> None:
    phases = {"solve": ALLOW, "score": PolicySpec(protected_paths=("/tests/**",))}
    (sandbox_id,) = await world.place(phases=phases, phase="solve")
    assert world.played.policies[sandbox_id].policy == ALLOW
    applied = await ask(world, subjects.SET_PHASE, SetPhase(sandbox_id=sandbox_id, name="score"))
    now = world.played.policies[sandbox_id]
    assert (now.generation, now.policy) == (applied.generation, phases["score"])
    assert now.netns_path is not None
    await ask(world, subjects.SET_NETWORK, SetNetwork(sandbox_id=sandbox_id, network=ALLOW.network))
    now = world.played.policies[sandbox_id]
    assert now.policy == PolicySpec(network=ALLOW.network, protected_paths=("/tests/**",))
    assert now.generation == applied.generation + 1
    with pytest.raises(InvalidArgument, match="score, solve"):
        await ask(world, subjects.SET_PHASE, SetPhase(sandbox_id=sandbox_id, name="cheat"))
    (bare,) = await world.place()
    change = SetNetwork(sandbox_id=bare, network=ALLOW.network)
    with pytest.raises(Unsupported, match="without a network"):
        await ask(world, subjects.SET_NETWORK, change)
    await ask(world, subjects.SET_NETWORK, SetNetwork(sandbox_id=bare, network=NetworkNone()))


async def test_a_later_phase_that_cannot_be_enforced_is_refused_at_create(
    world: EdgeWorld,
) -> None:
    phases = {"solve": PolicySpec(), "score": PolicySpec(protected_paths=("/tests",))}
    with pytest.raises(Unsupported, match="whole trees"):
        await world.place(phases=phases, phase="solve")
    assert world.leftovers() == {}


async def test_a_policy_the_service_has_lost_is_put_back(world: EdgeWorld) -> None:
    (sandbox_id,) = await world.place(policy=ALLOW)
    lost = world.played.policies.pop(sandbox_id)
    async with asyncio.timeout(20):  # the first sweep comes soon after a start
        await world.kill()
        await world.start()
        while sandbox_id not in world.played.policies:
            await asyncio.sleep(0.05)
    back = world.played.policies[sandbox_id]
    assert (back.policy, back.generation) == (lost.policy, lost.generation)
    assert (back.cgroup_id, back.ifindex, back.address) == (
        lost.cgroup_id, lost.ifindex, lost.address
    )  # fmt: skip


async def test_verbs_on_many_take_labels_and_stay_in_their_project(world: EdgeWorld) -> None:
    job = await world.place(3, labels={"job": "a"})
    (other,) = await world.place(labels={"job": "b"})
    selection = Selection(labels={"job": "a"})

    async def many(rpc: Any, selected: Selection, project: str = PROJECT) -> Any:
        return await world.bus.request(rpc, selected, project=project, budget_s=30)

    dry = await many(subjects.PAUSE_MANY, selection.model_copy(update={"dry_run": True}))
    assert set(dry.done) == set(job)
    assert (await world.info(job[0])).state is State.READY
    paused = await many(subjects.PAUSE_MANY, selection)
    assert (set(paused.done), paused.failed) == (set(job), {})
    states = {i.sandbox_id: i.state for i in (await many(subjects.LIST, Selection())).sandboxes}
    assert states == {**dict.fromkeys(job, State.PAUSED), other: State.READY}
    assert (await many(subjects.STOP_MANY, selection, "q")).done == ()
    assert (await many(subjects.LIST, Selection(), "q")).sandboxes == ()
    few = await many(subjects.RESUME_MANY, selection.model_copy(update={"limit": 1}))
    assert (len(few.done), few.dropped) == (1, 2)
    stopped = await many(subjects.STOP_MANY, selection)
    assert set(stopped.done) == set(job)
    everybody = await world.bus.request(subjects.LIST_ALL, Selection(), budget_s=5)
    assert [i.sandbox_id for i in everybody.sandboxes] == [other]


async def test_limits_can_be_moved_while_it_lives(world: EdgeWorld) -> None:
    (sandbox_id,) = await world.place(lifetime=Lifetime(idle_timeout_s=100))
    extended = await ask(
        world, subjects.EXTEND, ExtendSandbox(sandbox_id=sandbox_id, idle_timeout_s=1000)
    )
    before = (await world.info(sandbox_id)).expires_at
    assert before is not None
    assert extended.idle_expires_at == pytest.approx(before - 14_400 + 1000, abs=2)
    with pytest.raises(InvalidArgument):
        await ask(world, subjects.EXTEND, ExtendSandbox(sandbox_id=sandbox_id, max_lifetime_s=-1))
    await ask(world, subjects.EXTEND, ExtendSandbox(sandbox_id=sandbox_id, idle_timeout_s=0.3))
    async with asyncio.timeout(5):
        while sandbox_id in {i.sandbox_id for i in (await listing(world)).sandboxes}:
            await asyncio.sleep(0.05)


async def listing(world: EdgeWorld) -> Any:
    return await world.bus.request(subjects.LIST, Selection(), project=PROJECT, budget_s=5)


async def test_what_a_sandbox_uses_is_measured(world: EdgeWorld) -> None:
    (sandbox_id,) = await world.place()
    await world.run(sandbox_id, "dd if=/dev/zero of=/x bs=1M count=4; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")  # fmt: skip  # noqa: E501
    usage = await ask(world, subjects.METRICS, ById(sandbox_id=sandbox_id))
    assert usage.cpu_usage_s > 0.01
    assert usage.disk_bytes >= 4 << 20
    assert 32 << 20 <= usage.disk_limit_bytes < 40 << 20
    assert usage.memory_limit_bytes == 64 << 20
    assert usage.processes >= 1


async def test_offers_are_answered_alike_and_refused_by_reason(world: EdgeWorld) -> None:
    async with world.bus.inbox() as inbox:
        offer = world.offer(2, inbox.subject, inbox.nonce)
        first = await world.offered(offer)
        assert (await world.offered(offer)).accepted == first.accepted
        held = await world.bus.request(
            subjects.WHOHAS,
            WhoHas(request_id=offer.request_id, project=PROJECT, epoch=5),
            budget_s=5,
        )
        assert held.items == first.accepted
        late = await world.offered(offer.model_copy(update={"items": (7,), "epoch": 4}))
        assert late.refused is not None
        assert isinstance(late.refused.exception(), Conflict)
        stale = await world.offered(offer.model_copy(update={"session": "before"}))
        assert stale.refused is not None
        assert isinstance(stale.refused.exception(), Unavailable)
        await world.confirm(offer, first)
    with pytest.raises(InvalidArgument, match="memory_mib"):
        await world.place(resources=Resources(memory_mib=1))
    with pytest.raises(NoCapacity, match="latency-sensitive"):
        await world.place(qos="latency-sensitive", resources=Resources(cpus=200))
    with pytest.raises(Unsupported, match="microvm"):
        await world.place(backend="microvm")


async def test_a_layer_that_is_not_there_fails_the_item_with_its_name(world: EdgeWorld) -> None:
    gone = world.base.base.model_copy(update={"name": "gone", "digest": "0" * 64})
    world.base = world.base.model_copy(update={"base": gone})
    with pytest.raises(DataLoss, match="gone"):
        await world.place()
    assert world.leftovers() == {}


async def test_a_message_of_another_project_or_shape_finds_nothing(world: EdgeWorld) -> None:
    (sandbox_id,) = await world.place()
    with pytest.raises(NotFound):
        await ask(world, subjects.STOP, ById(sandbox_id=sandbox_id), "q")
    with pytest.raises(InvalidArgument):
        await ask(world, subjects.STOP, ById(sandbox_id="../../etc"))
    malformed = TraceQuery(trace_id="x")  # a message of another type on the verb's subject
    with pytest.raises(InvalidArgument, match="sandbox_id"):
        await ask(world, subjects.INFO, malformed)
    assert (await world.run(sandbox_id, "echo ok")).stdout == b"ok\n"


async def test_a_terminated_edge_hands_a_running_command_over(world: EdgeWorld) -> None:
    (sandbox_id,) = await world.place()
    running = asyncio.create_task(
        world.run(sandbox_id, "sleep 6; echo end", exec_id="long", budget_s=30)
    )
    await asyncio.sleep(0.5)
    async with asyncio.timeout(5):  # far less than the command takes
        assert await world.kill(signal.SIGTERM) == 0
    with pytest.raises(Unavailable):
        await running
    await world.start()
    done = await world.run(sandbox_id, "sleep 6; echo end", exec_id="long")
    assert done.stdout == b"end\n"


async def test_a_create_is_one_trace_and_its_phases_are_spans(world: EdgeWorld) -> None:
    async with world.bus.inbox() as inbox:
        offer = world.offer(1, inbox.subject, inbox.nonce)
        reply = await world.offered(offer)
        await world.confirm(offer, reply)
        (await inbox.next(10)).decode(Announcement)
    found = await world.bus.gather(
        subjects.TRACE, TraceQuery(request_id=offer.request_id), project=PROJECT, timeout_s=1.0
    )
    assert found.errors == {}
    spans: list[SpanRecord] = [s for answer in found.replies.values() for s in answer.spans]
    names = {span.name for span in spans}
    assert {"accepted", "layers", "network", "policy", "start", "ready", "agent"} <= names
    assert len({span.trace_id for span in spans}) == 1
