"""Schedulers, edges, NATS and Redis that die and come back while requests are under way.

After each: whoever asked holds one sandbox per item or a typed error, nothing was announced twice,
and nothing runs that nobody was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis import Redis

from libdsec.errors import DSecError
from libdsec.wire import subjects
from libdsec.wire.ids import sandbox_node
from libdsec.wire.node import NodeState
from libdsec.wire.placement import Offer
from libdsec.wire.sandbox import SandboxSpec

from .conftest import Connect
from .scheduler_stand import PROJECT, Answer, Stand, until
from .servers import NatsServer, Valkey

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
async def stand(
    tmp_path: Path, nats_server: NatsServer, valkey: Valkey, connect: Connect
) -> AsyncIterator[Stand]:
    stand = Stand(tmp_path, nats_server, valkey, connect)
    yield stand
    await stand.close()


def accounts_for(stand: Stand, answers: list[Answer]) -> bool:
    """What runs is what was given, once."""
    given = [s for answer in answers for s in answer.ready.values()]
    told = {(r, i) for edge in stand.edges.values() for r, i, _ in edge.announced}
    ids = {(r, i, s) for edge in stand.edges.values() for r, i, s in edge.announced}
    assert len(told) == len(ids), "an item was announced as two sandboxes"
    assert not [answer.twice for answer in answers if answer.twice]
    return len(given) == len(set(given)) and set(given) == stand.running()


async def keep_asking(stand: Stand, stop: asyncio.Event) -> list[Answer]:
    """A request every 20 ms until told to stop, and then all their answers."""
    asked: list[asyncio.Task[Answer]] = []
    while not stop.is_set():
        asked.append(asyncio.create_task(stand.create(count=3, budget_s=25.0)))
        await asyncio.sleep(0.02)
    return list(await asyncio.gather(*asked))


async def test_schedulers_killed_in_the_middle_lose_and_double_nothing(stand: Stand) -> None:
    await stand.open(schedulers=2, start_s=0.05)
    stop = asyncio.Event()
    asking = asyncio.create_task(keep_asking(stand, stop))
    for victim in range(2):
        before = len(stand.running())
        await until(lambda n=before + 30: len(stand.running()) >= n, within_s=30)
        stand.schedulers[victim].kill()
        await stand.add_scheduler().ready()
    stop.set()
    answers = await asking
    assert [a for a in answers if len(a.ready) < 3] == []
    await until(lambda: accounts_for(stand, answers), within_s=15)


async def test_nats_restarted_under_way(stand: Stand) -> None:
    """What was on its way to a caller is gone with the server. Who has heard nothing in time
    cancels, as the client does, and then nothing is left of it."""
    await stand.open(schedulers=2, start_s=0.05)
    stop = asyncio.Event()
    asking = asyncio.create_task(keep_asking(stand, stop))
    await until(lambda: len(stand.running()) >= 30, within_s=30)
    stop.set()
    stand.nats.kill()
    stand.nats.start()
    answers = await asking
    await until(stand.all_live, within_s=20)
    late = [answer for answer in answers if len(answer.ready) < 3]
    for answer in late:
        await stand.cancel(answer.request_id, answer.key)
    kept = [answer for answer in answers if len(answer.ready) == 3]
    assert kept
    await until(lambda: accounts_for(stand, kept), within_s=15)
    for scheduler in stand.schedulers:
        assert scheduler.check("/readyz") == 200


async def test_a_caller_whose_announcement_was_lost_asks_again_with_its_key(stand: Stand) -> None:
    await stand.open()
    first = await stand.create("k", count=2, settled=lambda answer: True)
    again = await stand.create("k", count=2)
    assert first.ready.items() <= again.ready.items()
    assert set(again.ready.values()) == stand.running()


async def test_redis_flushed_and_away(stand: Stand) -> None:
    await stand.open()
    redis = Redis.from_url(stand.valkey.url)
    redis.flushall()
    assert (await stand.create()).ready
    await until(lambda: redis.hlen(subjects.REDIS_NODES) == 2)
    stand.valkey.kill()
    scheduler = stand.schedulers[0]
    await until(lambda: scheduler.check("/readyz") == 503, within_s=15)
    assert (await stand.create()).ready  # the last view stays
    views = (await stand.nodes()).nodes
    assert {view.state for view in views} == {NodeState.LIVE}
    stand.valkey.start()
    await until(lambda: scheduler.check("/readyz") == 200, within_s=15)
    assert (await stand.create()).ready
    redis.close()


async def test_an_edge_that_dies_after_its_acceptance_goes_on_when_it_is_back(
    stand: Stand,
) -> None:
    await stand.open(edges=1, start_s=3600.0)
    creating = asyncio.create_task(stand.create(count=3, budget_s=30.0))
    edge = stand.edges["n0"]
    await until(lambda: len(edge.starting) == 3)
    accepted = set(edge.starting)
    await edge.crash()
    edge.start_s = 0.0
    await edge.start()
    answer = await creating
    assert set(answer.ready.values()) == accepted
    await until(lambda: accounts_for(stand, [answer]))


async def test_a_node_that_falls_silent_is_suspect_then_lost_and_its_work_goes_elsewhere(
    stand: Stand,
) -> None:
    await stand.open(edges=2)
    first = await stand.create("k")
    home = sandbox_node(first.ready[0])
    await stand.edges[home].crash()
    await stand.edges[home].bus.close()

    async def state() -> dict[str, NodeState]:
        return {v.heartbeat.node: v.state for v in (await stand.nodes()).nodes}

    async def is_lost() -> bool:
        return (await state())[home] is NodeState.LOST

    others = await asyncio.gather(*(stand.create(budget_s=20.0) for _ in range(4)))
    assert {sandbox_node(answer.ready[0]) for answer in others}.isdisjoint({home})
    await until(is_lost, within_s=20)
    again = await stand.create("k")
    assert again.failed[0].code == "sandbox_dead"
    assert again.failed[0].reason == "node_lost"


async def test_a_late_offer_of_an_older_epoch_is_refused_also_after_a_restart(
    stand: Stand,
) -> None:
    await stand.open(edges=1)
    edge = stand.edges["n0"]
    await stand.create()
    old = edge.offers[0]
    newer = old.model_copy(update={"request_id": "r9", "epoch": 3})
    await stand.caller.request(subjects.OFFER, newer, node="n0", budget_s=2)
    await edge.crash()
    await edge.start()
    await until(lambda: edge.ledger.lease.valid)
    late = newer.model_copy(update={"epoch": 2, "session": edge.ledger.session})
    reply = await stand.caller.request(subjects.OFFER, late, node="n0", budget_s=2)
    assert not reply.accepted
    assert reply.refused is not None
    assert reply.refused.code == "conflict"
    assert "epoch 2" in reply.refused.message


async def test_what_no_scheduler_confirms_is_gone_within_one_lease(stand: Stand) -> None:
    """An offer by somebody who has no claim, as by a scheduler that was frozen for long."""
    await stand.open(edges=1)
    edge = stand.edges["n0"]
    given = await stand.create()
    zombie: Offer = edge.offers[0].model_copy(
        update={"request_id": "zombie", "key": "zombie", "budget_ms": 60_000}
    )
    reply = await stand.caller.request(subjects.OFFER, zombie, node="n0", budget_s=2)
    stray = reply.accepted[0].sandbox_id
    assert stray in stand.running()
    await until(lambda: stray not in stand.running(), within_s=12)
    assert stray not in {s for _, _, s in edge.announced}
    assert stand.running() == set(given.ready.values())


async def test_a_node_speaks_for_itself_only(stand: Stand) -> None:
    await stand.open()
    answer = await stand.create("k")
    edge = stand.edges["n0"]
    held = {"request_id": answer.request_id, "project": PROJECT, "key": "k", "epoch": 1}
    foreign = {"index": 0, "sandbox_id": "n7_aaaaaa_aaaaaaaaaaaa"}
    inquiry = subjects.INQUIRE.request.model_validate({"held": [held | {"items": [foreign]}]})
    with pytest.raises(DSecError, match="not its own"):
        await edge.bus.request(subjects.INQUIRE, inquiry, node="n0", budget_s=2)
    assert stand.running() == set(answer.ready.values())


async def test_two_watchers_and_a_scheduler_that_starts_late_agree(stand: Stand) -> None:
    await stand.open(schedulers=2)
    late = stand.add_scheduler()
    await late.ready()
    for scheduler in stand.schedulers[:2]:
        scheduler.kill()
    await until(stand.all_live, within_s=15)
    assert (await stand.create(count=2, spec=SandboxSpec(image="base"))).ready
