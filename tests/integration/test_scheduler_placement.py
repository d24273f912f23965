"""Schedulers over real NATS and Valkey: what a caller gets for what it asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidArgument,
    NoCapacity,
    NotFound,
    Unsupported,
)
from libdsec.wire import subjects
from libdsec.wire.deadletter import DeadLetterAction, DeadLetterQuery, QueueQuery
from libdsec.wire.ids import sandbox_node
from libdsec.wire.model import Empty
from libdsec.wire.sandbox import Backend, NetworkPublic, PolicySpec, Resources, SandboxSpec

from .conftest import Connect
from .scheduler_stand import PROJECT, Stand, until
from .servers import NatsServer, Valkey


@pytest.fixture
async def stand(
    tmp_path: Path, nats_server: NatsServer, valkey: Valkey, connect: Connect
) -> AsyncIterator[Stand]:
    stand = Stand(tmp_path, nats_server, valkey, connect)
    yield stand
    await stand.close()


async def test_a_request_becomes_one_sandbox(stand: Stand) -> None:
    await stand.open()
    answer = await stand.create()
    assert answer.error is None
    assert set(answer.ready.values()) == stand.running()


async def test_many_are_spread_over_the_nodes_and_offered_in_groups(stand: Stand) -> None:
    await stand.open()
    answer = await stand.create(count=64)
    assert len(answer.ready) == 64
    nodes = [sandbox_node(s) for s in answer.ready.values()]
    assert {nodes.count("n0"), nodes.count("n1")} == {32}
    assert sum(len(edge.offers) for edge in stand.edges.values()) == 2


async def test_the_same_key_gives_the_same_sandboxes_and_others_arguments_conflict(
    stand: Stand,
) -> None:
    await stand.open(schedulers=2)
    first, second = await asyncio.gather(stand.create("k", count=3), stand.create("k", count=3))
    third = await stand.create("k", count=3)
    other = await stand.create("k", count=2)
    assert first.ready == second.ready == third.ready
    assert len(first.ready) == 3
    assert isinstance(other.error, Conflict)
    assert stand.running() == set(first.ready.values())


async def test_another_projects_key_has_nothing_to_do_with_it(
    stand: Stand, connect: Connect
) -> None:
    await stand.open()
    mine = await stand.create("k")
    stand.caller = await connect("rival", inbox_prefix="_INBOX.rival.caller")
    theirs = await stand.create("k", project="rival")
    assert theirs.ready[0] != mine.ready[0]


async def test_a_foreign_inbox_is_a_dead_letter_and_hears_nothing(stand: Stand) -> None:
    await stand.open()
    answer = await stand.create(project="rival", budget_s=1.0)
    assert isinstance(answer.error, DeadlineExceeded)
    assert not stand.running()

    async def buried() -> bool:
        listing = await stand.caller.request(subjects.DLQ_LIST, DeadLetterQuery(), budget_s=2)
        return any("inbox" in letter.reason for letter in listing.letters)

    await until(buried)


async def test_what_can_never_work_is_said_at_once_and_names_the_way_out(stand: Stand) -> None:
    await stand.open()
    base = SandboxSpec(image="base@1")
    cases = [
        (base.model_copy(update={"image": "nowhere@1"}), NotFound, "public/base@1"),
        (base.model_copy(update={"image": "base@7"}), NotFound, "public/base@1"),
        (base.model_copy(update={"backend": Backend.MICROVM}), Unsupported, "container"),
        (
            base.model_copy(update={"policy": PolicySpec(network=NetworkPublic())}),
            Unsupported,
            "egress",
        ),
        (
            base.model_copy(update={"resources": Resources(memory_mib=900_000)}),
            InvalidArgument,
            "64000",
        ),
        (base.model_copy(update={"resources": Resources(cpus=-1)}), InvalidArgument, "cpus"),
    ]
    for spec, kind, word in cases:
        answer = await stand.create(spec=spec, budget_s=30.0)
        assert type(answer.error) is kind, answer
        assert word in str(answer.error)
        assert answer.error is not None
        assert answer.error.request_id == answer.request_id
    assert not stand.running()


async def test_newest_is_what_was_published_last(stand: Stand) -> None:
    await stand.open()
    await stand.create(spec=SandboxSpec(image="base"))
    await stand.publish_layer("base", "2")
    await stand.create(spec=SandboxSpec(image="base"))
    offers = [o for edge in stand.edges.values() for o in edge.offers]
    assert {offer.layers.base.version for offer in offers} == {"1", "2"}


async def test_full_nodes_make_a_request_wait_and_say_why(stand: Stand) -> None:
    await stand.open(room=1)
    taken = await stand.create(count=2)
    waiting = asyncio.create_task(stand.create(budget_s=20.0))
    refused = await stand.create(budget_s=2.0)
    assert isinstance(refused.error, NoCapacity)
    assert "full 2" in str(refused.error)
    assert refused.progress
    assert refused.progress[0].dropped_by_filter == {"full": 2}
    edge = stand.edges[sandbox_node(taken.ready[0])]
    del edge.ready[taken.ready[0]]
    assert len((await waiting).ready) == 1


async def test_a_waiting_request_is_seen_in_the_queue(stand: Stand) -> None:
    await stand.open(room=0)
    waiting = asyncio.create_task(stand.create(budget_s=5.0))

    async def seen() -> bool:
        listing = await stand.caller.request(
            subjects.QUEUE, QueueQuery(), project=PROJECT, budget_s=2
        )
        return [lane.waiting for lane in listing.lanes] == [1]

    await until(seen)
    assert isinstance((await waiting).error, NoCapacity)


async def test_a_malformed_message_is_buried_and_can_be_replayed(stand: Stand) -> None:
    await stand.open()
    lane = subjects.lane_subject(PROJECT, SandboxSpec(image="b").qos, Backend.CONTAINER)
    await stand.caller.nats.jetstream().publish(lane, b"{not json")
    assert (await stand.create()).ready
    letters = (await stand.caller.request(subjects.DLQ_LIST, DeadLetterQuery(), budget_s=2)).letters
    assert [(letter.subject, letter.payload) for letter in letters] == [(lane, b"{not json")]
    action = DeadLetterAction(seqs=(letters[0].seq,))
    outcome = await stand.caller.request(subjects.DLQ_REPLAY, action, budget_s=2)
    assert outcome.done == (letters[0].seq,)

    async def back() -> bool:
        listing = await stand.caller.request(subjects.DLQ_LIST, DeadLetterQuery(), budget_s=2)
        return len(listing.letters) == 1 and listing.letters[0].seq != letters[0].seq

    await until(back)


async def test_cancel_before_and_after_the_placement(stand: Stand) -> None:
    await stand.open(room=1, edges=1)
    kept = await stand.create("kept", request_id="kept")
    waiting = asyncio.create_task(
        stand.create("w", request_id="w", settled=lambda answer: bool(answer.progress))
    )
    await waiting
    await stand.cancel("w", "w")
    await stand.cancel("kept", "kept")
    assert not stand.running()
    again = await stand.create("kept")
    assert again.ready
    assert again.ready != kept.ready

    async def empty() -> bool:
        listing = await stand.caller.request(
            subjects.QUEUE, QueueQuery(), project=PROJECT, budget_s=2
        )
        return not listing.lanes

    await until(empty, within_s=5.0)  # the cancelled one was dropped, not placed
    assert stand.running() == set(again.ready.values())


async def test_a_start_that_fails_is_placed_again_elsewhere(stand: Stand) -> None:
    await stand.open()
    for edge in stand.edges.values():
        edge.failing = 1
    answer = await stand.create(count=1)
    assert len(answer.ready) == 1
    assert not answer.twice
    assert stand.running() == set(answer.ready.values())
    attempts = sorted(o.attempt for edge in stand.edges.values() for o in edge.offers)
    assert attempts == [1, 2, 3]


async def test_without_a_burst_service_full_local_nodes_make_requests_wait(stand: Stand) -> None:
    await stand.open(edges=1, room=4)
    await stand.add_edge("cloud1", pool="cloud")
    await until(stand.all_live)
    await stand.create(count=4)
    waiting = await stand.create(budget_s=2.0)
    assert isinstance(waiting.error, NoCapacity)
    assert "pool 1" in str(waiting.error)
    assert not stand.edges["cloud1"].sandboxes


async def test_the_burst_service_opens_the_cloud_to_what_may_go_there(stand: Stand) -> None:
    await stand.open(edges=1, room=4)
    await stand.add_edge("cloud1", pool="cloud")
    await stand.publish_layer("private", "1")
    await stand.add_burst("base-1\n")
    await until(stand.all_live)
    await stand.create(count=4)

    async def bursts() -> bool:
        status = await stand.caller.request(subjects.BURST_STATUS, Empty(), budget_s=2)
        return status.bursting

    await until(bursts)
    overflow = await stand.create(count=8)
    assert set(overflow.ready.values()) == stand.edges["cloud1"].sandboxes
    stays = await stand.create(spec=SandboxSpec(image="private@1"), budget_s=2.0)
    assert isinstance(stays.error, NoCapacity)
