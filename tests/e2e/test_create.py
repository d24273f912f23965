"""One request, one sandbox: what a caller is promised about creates, through all services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, SandboxDead, sync
from libdsec.bus import Bus
from libdsec.errors import Conflict, DSecError, NotFound
from libdsec.wire.layer import ResolvedLayers
from libdsec.wire.placement import Offer, WhoHas
from libdsec.wire.sandbox import SandboxSpec
from libdsec.wire.subjects import OFFER, WHOHAS
from services.stack.users import Role, service_user
from tests.chaos.processes import restart
from tests.stack import IMAGE, SMALL, Stack

from .mirror import Mirror


async def test_listing_one_runs_unchanged(
    stack: Stack, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_CONTEXT", str(stack.context))
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(
        container_image=IMAGE,
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": True},
        init_user="root",
    )
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    assert result.stdout == "hello world\n"
    await sandbox.stop()
    await client.close()


async def test_same_key_and_arguments_is_one_sandbox(client: DSecClient) -> None:
    first, second = await asyncio.gather(
        client.create(image=IMAGE, **SMALL, idempotency_key="one"),
        client.create(image=IMAGE, **SMALL, idempotency_key="one"),
    )
    third = await client.create(image=IMAGE, **SMALL, idempotency_key="one")
    assert first.id == second.id == third.id
    assert [info.sandbox_id async for info in client.list()].count(first.id) == 1
    with pytest.raises(Conflict, match="'one'"):
        await client.create(image=IMAGE, **{**SMALL, "pids": 99}, idempotency_key="one")
    await first.stop()


async def test_a_key_whose_sandbox_has_ended_says_so(client: DSecClient) -> None:
    ended = await client.create(image=IMAGE, **SMALL, idempotency_key="ended")
    await ended.stop()
    with pytest.raises(SandboxDead) as told:
        await client.create(image=IMAGE, **SMALL, idempotency_key="ended", timeout=20)
    assert told.value.reason == "stopped"


async def test_another_projects_key_is_its_own(stack: Stack, client: DSecClient) -> None:
    async with DSecClient(context=stack.add_user("carol", "team-c")) as other:
        mine = await client.create(image=IMAGE, **SMALL, idempotency_key="shared-name")
        theirs = await other.create(image=IMAGE, **SMALL, idempotency_key="shared-name")
        assert mine.id != theirs.id
        with pytest.raises(NotFound):
            await other.connect(mine.id)
        assert mine.id not in [info.sandbox_id async for info in other.list()]
        await mine.stop()
        await theirs.stop()


async def test_create_many_answers_each_item(stack: Stack, client: DSecClient) -> None:
    made = await client.create_many(20, image=IMAGE, **SMALL)
    failed = [item for item in made if isinstance(item, DSecError)]
    assert failed == []
    sandboxes = [item for item in made if not isinstance(item, DSecError)]
    assert len({s.id for s in sandboxes}) == 20
    assert {s.node for s in sandboxes} == set(stack.node_names)
    results = await asyncio.gather(*(s.exec(["echo", s.id]) for s in sandboxes))
    assert [r.stdout.strip() for r in results] == [s.id for s in sandboxes]
    await asyncio.gather(*(s.stop() for s in sandboxes))


async def test_many_by_label(client: DSecClient) -> None:
    made = await client.create_many(4, image=IMAGE, **SMALL, labels={"job": "many"})
    ids = sorted(s.id for s in made if not isinstance(s, DSecError))
    foreseen = await client.stop_many(labels={"job": "many"}, dry_run=True)
    assert list(foreseen.done) == ids
    paused = await client.pause_many(labels={"job": "many"})
    assert list(paused.done) == ids
    assert {i.state async for i in client.list(labels={"job": "many"})} == {"paused"}
    resumed = await client.resume_many(labels={"job": "many"}, limit=2)
    assert len(resumed.done) == 2
    stopped = await client.stop_many(labels={"job": "many"})
    assert list(stopped.done) == ids
    assert stopped.coverage.missing == frozenset()


def test_the_blocking_twin_does_the_same(stack: Stack) -> None:
    with sync.DSecClient(context=stack.context) as client:
        with client.create(image=IMAGE, **SMALL) as sandbox:
            assert sandbox.exec("echo $((6*7))").stdout == "42\n"
            sandbox.files.write("/tmp/note", b"from a thread")
            assert sandbox.files.read("/tmp/note") == b"from a thread"
            assert sandbox.id in [info.sandbox_id for info in client.list()]
        with pytest.raises(SandboxDead):
            sandbox.exec(["true"])


async def test_a_late_message_of_an_older_epoch_is_refused(
    stack: Stack, client: DSecClient
) -> None:
    """A scheduler that was overtaken cannot have a node start anything, also after a restart."""
    base = await client.layers.info(IMAGE)
    node = stack.node_names[0]
    async with as_scheduler(stack) as scheduler:
        views = {view.heartbeat.node: view.heartbeat for view in await client.nodes()}
        late = Offer(
            request_id="late-request", project="default", key="late", epoch=3,
            session=views[node].session, items=(0,), reply_to="_INBOX.default.default.x",
            nonce="n", budget_ms=30_000, spec=SandboxSpec(image=IMAGE),
            layers=ResolvedLayers(base=base),
        )  # fmt: skip
        ask = WhoHas(request_id=late.request_id, project=late.project, epoch=4)
        asked = await scheduler.gather(WHOHAS, ask, timeout_s=5, expect=[node])
        assert asked.replies[node].items == ()
        await is_refused(scheduler, late, node)
        session = await restarted(stack, client, node, late.session)
        await is_refused(scheduler, late.model_copy(update={"session": session}), node)
    assert late.request_id not in [info.request_id async for info in client.list()]


async def is_refused(scheduler: Bus, offer: Offer, node: str) -> None:
    reply = await scheduler.request(OFFER, offer, node=node, budget_s=5)
    assert reply.accepted == ()
    assert reply.refused is not None
    assert (reply.refused.code, "epoch 3" in reply.refused.message) == ("conflict", True)


@asynccontextmanager
async def as_scheduler(stack: Stack) -> AsyncIterator[Bus]:
    """The bus with the credentials of the stack's own schedulers."""
    user = service_user("scheduler", Role.SERVICE, stack.paths.secret("scheduler"))
    bus = await Bus.connect(
        [f"nats://127.0.0.1:{stack.description.hub_port}"], name="test",
        user=user.name, password=user.password, inbox_prefix=user.inbox_prefix,
    )  # fmt: skip
    try:
        yield bus
    finally:
        await bus.close()


async def restarted(stack: Stack, client: DSecClient, node: str, session: str) -> str:
    """The session of a node's next edge, once schedulers know it."""
    await restart(stack, f"edge-{node}", {})
    async with asyncio.timeout(20):
        while True:
            views = {view.heartbeat.node: view.heartbeat for view in await client.nodes()}
            if views[node].session != session and views[node].policy_ready:
                return views[node].session
            await asyncio.sleep(0.1)
