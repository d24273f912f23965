"""An edge that is killed, and the next one: everything lives on, nothing is left or lost."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec.bus import Part
from libdsec.errors import DeathReason, DSecError, NotFound, SandboxDead, Unavailable
from libdsec.wire import subjects
from libdsec.wire.execution import AttachExec, ExecDone, ExecRequest
from libdsec.wire.ids import sandbox_incarnation
from libdsec.wire.model import Empty
from libdsec.wire.node import NodeCommand
from libdsec.wire.placement import Announcement
from libdsec.wire.sandbox import Lifetime, PauseSandbox, Selection, State
from services.edge.journal_file import load
from services.edge.record import Status

from .edge_process import PROJECT, EdgeWorld, edge_world

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root"),
    pytest.mark.skipif(shutil.which("crun") is None, reason="crun is not installed"),
    pytest.mark.timeout(120),
]

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /count; sleep 0.02; done"


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as world:
        yield world


async def begin(world: EdgeWorld, sandbox_id: str, shell: str, exec_id: str) -> None:
    """A command that goes on by itself."""
    request = ExecRequest(
        sandbox_id=sandbox_id, exec_id=exec_id, shell=shell, detach=True, timeout_s=None,
        max_output_bytes=64 << 20,
    )  # fmt: skip
    async with world.bus.converse(
        subjects.EXEC, request, project=PROJECT, node=world.node, budget_s=10
    ) as talk:
        async for _ in talk:
            return


async def count(world: EdgeWorld, sandbox_id: str) -> int:
    async with asyncio.timeout(10):
        while True:
            text = (await world.run(sandbox_id, "cat /count")).stdout.strip()
            if text:  # the shell empties the file before it writes
                return int(text)


def first_process(world: EdgeWorld, sandbox_id: str) -> int:
    """As the edge's journal has it."""
    journal = load((world.paths.state_dir / "journal").read_bytes())
    status = Status.model_validate_json(journal.entries[f"status.{sandbox_id}"])
    assert status.process is not None
    return status.process.pid


def layer_mounts(world: EdgeWorld) -> int:
    assert world.process is not None
    lines = Path(f"/proc/{world.process.pid}/mountinfo").read_text().splitlines()
    return sum(str(world.paths.layers_dir) in line for line in lines)


async def test_killed_again_and_again_every_sandbox_counts_on(world: EdgeWorld) -> None:
    await world.start()
    ids = await world.place(5)
    for sandbox_id in ids:
        await begin(world, sandbox_id, COUNTER, "counter")
    pids = {sandbox_id: first_process(world, sandbox_id) for sandbox_id in ids}
    last = {sandbox_id: await count(world, sandbox_id) for sandbox_id in ids}
    chance = random.Random(7)
    for _ in range(5):
        await asyncio.sleep(chance.uniform(0, 0.3))
        await world.kill()
        await world.start()
        assert layer_mounts(world) == 1
        for sandbox_id in ids:
            now = await count(world, sandbox_id)
            assert now > last[sandbox_id]
            last[sandbox_id] = now
    assert {sandbox_id: first_process(world, sandbox_id) for sandbox_id in ids} == pids
    listing = await world.bus.request(subjects.LIST, Selection(), project=PROJECT, budget_s=5)
    assert {info.sandbox_id for info in listing.sandboxes} == set(ids)
    for sandbox_id in ids:
        assert (await world.stop(sandbox_id)).death == DeathReason.STOPPED.value
    assert world.leftovers() == {}


async def test_no_output_below_the_rings_size_is_lost_over_restarts(world: EdgeWorld) -> None:
    await world.start()
    (sandbox_id,) = await world.place()
    lines = (
        "while [ $i -lt 3000 ]; do i=$((i+1)); echo line $i; [ $((i%50)) = 0 ] && sleep 0.05; done"
    )
    await begin(world, sandbox_id, f"i=0; {lines}; echo end", "printer")
    wanted = b"".join(b"line %d\n" % n for n in range(1, 3001)) + b"end\n"
    got = b""
    for _ in range(3):
        await asyncio.sleep(0.3)
        await world.kill()
        await world.start()

    async def attach() -> tuple[bytes, ExecDone]:
        ask = AttachExec(sandbox_id=sandbox_id, exec_id="printer", stdout_offset=len(got))
        chunks: list[bytes] = []

        def keep(part: Part) -> None:
            if part.kind == "output":
                chunks.append(part.data)

        done = await world.bus.request(
            subjects.ATTACH, ask, project=PROJECT, node=world.node, budget_s=30, on_part=keep
        )
        return b"".join(chunks) + done.stdout, done

    output, done = await attach()
    assert output == wanted
    assert (done.exit_code, done.truncated) == (0, False)


async def test_what_died_meanwhile_is_told_with_its_reason(world: EdgeWorld) -> None:
    await world.start()
    killed, oomed, lives = await world.place(3)
    oom_pid = first_process(world, oomed)
    await world.kill()
    os.kill(first_process(world, killed), signal.SIGKILL)
    os.kill(oom_pid, signal.SIGKILL)
    await world.start()
    with pytest.raises(SandboxDead) as caught:
        await world.run(killed, "true")
    assert caught.value.reason is DeathReason.KILLED
    assert (await world.run(lives, "echo ok")).stdout == b"ok\n"
    await world.stop(lives)
    await until_clean(world)  # the policies of the dead go at the first sweep


async def test_a_stop_that_was_cut_short_is_finished_with_its_reason(world: EdgeWorld) -> None:
    await world.start(DSEC_FAULT="during_stop:kill")
    (sandbox_id,) = await world.place()
    with pytest.raises(DSecError):
        await world.stop(sandbox_id, budget_s=2)
    await world.start()
    assert await until_dead(world, sandbox_id) is DeathReason.STOPPED
    await until_clean(world)


@pytest.mark.parametrize(
    "point", ["after_accept_fsync", "before_offer_reply", "during_start", "before_announce"]
)
async def test_accepted_work_outlives_the_edge_and_is_announced_once(
    world: EdgeWorld, point: str
) -> None:
    await world.start(DSEC_FAULT=f"{point}:kill")
    async with world.bus.inbox() as inbox:
        offer = world.offer(2, inbox.subject, inbox.nonce, 60.0)
        try:
            reply = await world.offered(offer)
        except DSecError:
            reply = None
        if reply is not None:
            await world.confirm(offer, reply)
        await asyncio.to_thread(lambda: world.process and world.process.wait(20))
        await world.start()
        if reply is None:
            # The scheduler does not know: it asks, with a session that it has heard of since.
            again = offer.model_copy(update={"session": world.played.heartbeats[-1].session})
            reply = await world.offered(again)
            await world.confirm(again, reply)
        assert reply.refused is None
        ready: dict[int, str] = {}
        async with asyncio.timeout(20):
            while len(ready) < 2:
                told = (await inbox.next(20)).decode(Announcement)
                assert told.failed == {}
                ready |= {item.index: item.sandbox_id for item in told.ready}
    assert ready == {item.index: item.sandbox_id for item in reply.accepted}
    for sandbox_id in ready.values():
        assert (await world.run(sandbox_id, "echo here")).stdout == b"here\n"
        await world.stop(sandbox_id)
    assert world.leftovers() == {}


async def test_a_reply_that_was_lost_is_given_again_without_running_twice(
    world: EdgeWorld,
) -> None:
    await world.start(DSEC_FAULT="before_reply:kill")
    (sandbox_id,) = await world.place()
    with pytest.raises(DSecError):
        await world.run(sandbox_id, "echo x >> /log; echo done", exec_id="e1", budget_s=3)
    await world.start()
    done = await world.run(sandbox_id, "echo x >> /log; echo done", exec_id="e1")
    assert (done.stdout, done.recorded) == (b"done\n", True)
    assert (await world.run(sandbox_id, "wc -l < /log")).stdout.strip() == b"1"


async def test_a_paused_sandbox_stays_paused_and_its_time_goes_on(world: EdgeWorld) -> None:
    await world.start()
    (sandbox_id,) = await world.place(lifetime=Lifetime(max_paused_s=100))
    await begin(world, sandbox_id, COUNTER, "counter")
    await count(world, sandbox_id)
    ask = PauseSandbox(sandbox_id=sandbox_id)
    await world.bus.request(subjects.PAUSE, ask, project=PROJECT, node=world.node, budget_s=15)
    before = (await world.info(sandbox_id)).paused_expires_at
    await world.kill()
    await world.start()
    info = await world.info(sandbox_id)
    assert info.state is State.PAUSED
    assert before is not None
    assert info.paused_expires_at == pytest.approx(before, abs=0.2)
    first = await count(world, sandbox_id)  # resumes it
    await asyncio.sleep(0.1)
    assert await count(world, sandbox_id) > first


async def test_a_command_that_runs_keeps_an_adopted_sandbox_from_growing_idle(
    world: EdgeWorld,
) -> None:
    await world.start()
    (sandbox_id,) = await world.place(lifetime=Lifetime(idle_timeout_s=1.0))
    await begin(world, sandbox_id, "sleep 6", "sleeper")
    await world.kill()
    await world.start()
    await asyncio.sleep(1.2)  # longer than it may be idle
    assert (await world.info(sandbox_id)).state is State.READY
    assert await until_dead(world, sandbox_id) is DeathReason.EXPIRED


async def test_a_terminated_edge_leaves_its_sandboxes_to_the_next(world: EdgeWorld) -> None:
    await world.start()
    (sandbox_id,) = await world.place()
    pid = first_process(world, sandbox_id)
    assert await world.kill(signal.SIGTERM) == 0
    os.kill(pid, 0)
    await world.start()
    assert first_process(world, sandbox_id) == pid
    assert (await world.run(sandbox_id, "echo ok")).stdout == b"ok\n"


async def test_a_second_edge_for_the_node_refuses_and_names_the_first(world: EdgeWorld) -> None:
    await world.start()
    (sandbox_id,) = await world.place()
    second = world.spawn()
    assert await asyncio.to_thread(second.wait, 20) == 3
    assert world.process is not None
    assert f"another edge serves node {world.node}: process {world.process.pid}" in world.log
    assert (await world.run(sandbox_id, "echo ok")).stdout == b"ok\n"


async def test_without_its_policy_service_a_node_takes_nothing_and_keeps_what_it_has(
    world: EdgeWorld,
) -> None:
    await world.start()
    (sandbox_id,) = await world.place()
    world.played.policy_ready = False
    async with asyncio.timeout(10):
        while world.played.heartbeats[-1].policy_ready:
            await asyncio.sleep(0.05)
    with pytest.raises(Unavailable, match="policy"):
        await world.place()
    assert (await world.run(sandbox_id, "echo ok")).stdout == b"ok\n"
    world.played.policy_ready = True
    async with asyncio.timeout(10):
        while not world.played.heartbeats[-1].policy_ready:
            await asyncio.sleep(0.05)
    await world.place()


async def test_a_cordon_is_remembered(world: EdgeWorld) -> None:
    await world.start()

    async def order(rpc: object) -> None:
        command = NodeCommand(node=world.node, by="test")
        await world.bus.request(rpc, command, node=world.node, budget_s=5)  # type: ignore[arg-type]

    await order(subjects.NODE_CORDON)
    await world.kill()
    await world.start()
    assert world.played.heartbeats[-1].cordoned
    with pytest.raises(Unavailable, match="cordoned"):
        await world.place()
    await order(subjects.NODE_UNCORDON)
    await world.place()
    found = await world.bus.request(
        subjects.NODE_CAPABILITIES, Empty(), node=world.node, budget_s=5
    )
    assert found.facts["root"] == "yes"
    assert found.facts["disk"] in {"loop", "quota"}


async def test_running_sandboxes_do_not_notice_that_the_bus_is_away(world: EdgeWorld) -> None:
    await world.start()
    (sandbox_id,) = await world.place(lifetime=Lifetime(idle_timeout_s=2.0))
    await begin(world, sandbox_id, f"({COUNTER}) & sleep 0.2", "counter")
    await asyncio.sleep(0.5)
    world.nats.kill()
    await asyncio.sleep(3.0)  # longer than it may be idle, but nobody could have used it
    world.nats.start()
    async with asyncio.timeout(20):
        while True:
            try:
                first = await count(world, sandbox_id)
                break
            except Unavailable:
                await asyncio.sleep(0.1)
    assert await count(world, sandbox_id) >= first > 50


async def test_a_state_directory_made_anew_is_another_incarnation(world: EdgeWorld) -> None:
    await world.start()
    (sandbox_id,) = await world.place()
    await world.stop(sandbox_id)
    await world.kill()
    (world.paths.state_dir / "journal").unlink()
    await world.start()
    with pytest.raises(SandboxDead) as caught:
        await world.run(sandbox_id, "true")
    assert caught.value.reason is DeathReason.NODE_LOST
    (other,) = await world.place()
    assert sandbox_incarnation(other) != sandbox_incarnation(sandbox_id)


async def test_a_journal_with_a_bad_record_costs_that_sandbox_alone(world: EdgeWorld) -> None:
    await world.start()
    bad, good = await world.place(2)
    await world.kill()
    path = world.paths.state_dir / "journal"
    text = path.read_bytes()
    path.write_bytes(text.replace(b"origin.%s {" % bad.encode(), b"origin.%s [" % bad.encode()))
    await world.start()
    assert (await world.run(good, "echo ok")).stdout == b"ok\n"
    with pytest.raises(NotFound):
        await world.run(bad, "true")
    await world.stop(good)
    await until_clean(world)
    assert path.with_suffix(".quarantine").exists()


async def test_what_was_to_be_killed_is_killed_by_the_successor(world: EdgeWorld) -> None:
    """The verdict is journaled, and the edge dies before the kill has begun."""
    await world.start(DSEC_FAULT="before_announce:kill")
    async with world.bus.inbox() as inbox:
        offer = world.offer(2, inbox.subject, inbox.nonce)
        reply = await world.offered(offer)
        lost, named = reply.accepted
        for item in reply.accepted:
            await until_ready(world, item.sandbox_id)
        world.played.claims[offer.request_id] = {named.index: named.sandbox_id}
        verdict = world.played.verdict(offer.request_id).model_copy(update={"lost": (lost,)})
        await world.bus.publish(subjects.VERDICT, verdict, node=world.node)
        assert world.process is not None
        assert await asyncio.to_thread(world.process.wait, 10) == -signal.SIGKILL
        await world.start()
        assert await until_dead(world, lost.sandbox_id) is DeathReason.STOPPED
        assert (await world.run(named.sandbox_id, "echo on")).stdout == b"on\n"
    await world.stop(named.sandbox_id)
    await until_clean(world)


async def until_ready(world: EdgeWorld, sandbox_id: str) -> None:
    async with asyncio.timeout(10):
        while (await world.info(sandbox_id)).state is not State.READY:
            await asyncio.sleep(0.02)


async def until_dead(world: EdgeWorld, sandbox_id: str) -> DeathReason:
    async with asyncio.timeout(10):
        while True:
            try:
                await world.info(sandbox_id)
            except SandboxDead as err:
                return err.reason
            await asyncio.sleep(0.05)


async def until_clean(world: EdgeWorld) -> None:
    async with asyncio.timeout(15):
        while world.leftovers():
            await asyncio.sleep(0.1)
