"""The edge's ledger by itself: what each call gives, and what survives a restart."""

from __future__ import annotations

import pytest

from libdsec.errors import SandboxDead, Unavailable
from libdsec.wire.defaults import LEASE_S
from libdsec.wire.error import ErrorReply
from libdsec.wire.layer import LayerInfo, LayerKind, ResolvedLayers
from libdsec.wire.placement import MAX_ATTEMPTS, AcceptedItem, Offer, Verdict, WhoHas
from libdsec.wire.sandbox import SandboxSpec
from services.edge.placement import (
    PREFIX,
    Admission,
    Announce,
    AskRetry,
    Fate,
    Inquire,
    Kill,
    Ledger,
    Start,
    Step,
)

LAYER = LayerInfo(
    space="public", name="base", version="1", digest="d", kind=LayerKind.BASE, size_bytes=1,
    files=1, created_at=0.0,
)  # fmt: skip
BUDGET_S = 20.0


def offer(*items: int, epoch: int = 1, session: str = "s1", attempt: int = 1) -> Offer:
    return Offer(
        request_id="r", project="p", key="k", epoch=epoch, session=session, items=items,
        count=len(items), attempt=attempt, reply_to="_INBOX.p.1", nonce="n",
        budget_ms=int(BUDGET_S * 1e3), spec=SandboxSpec(image="base"),
        layers=ResolvedLayers(base=LAYER),
    )  # fmt: skip


class Node:
    """A ledger with a clock, a journal and a watcher that hears everything."""

    def __init__(self) -> None:
        self.now = 100.0
        self.journal: dict[str, bytes] = {}
        self.boots = 0
        self.room = 10
        self.start({})

    def start(self, fates: dict[str, Fate]) -> Step[None]:
        self.boots += 1
        self.seq = 0
        self.ledger = Ledger(
            node="n1", incarnation="aaaaaa", session=f"s{self.boots}", clock=lambda: self.now,
            wall_ms=lambda: int(self.now * 1e3),
        )  # fmt: skip
        step = self.ledger.restore(list(self.journal.items()), fates)
        self.beat()
        return step

    def put(self, key: str, value: bytes) -> None:
        self.journal[key] = value

    def drop(self, key: str) -> None:
        self.journal.pop(key, None)

    def write(self, step: Step[object]) -> None:
        for record in step.records:
            record.apply(self)

    def beat(self) -> None:
        self.seq += 1
        self.ledger.lease.sent(self.seq)
        self.ledger.lease.acked(self.ledger.session, self.seq)

    def take(self, *items: int, epoch: int = 1, attempt: int = 1) -> list[AcceptedItem]:
        wanted = offer(*items, epoch=epoch, session=self.ledger.session, attempt=attempt)
        step = self.ledger.offer(wanted, lambda n: Admission(min(n, self.room)))
        self.write(step)
        return list(step.reply.accepted)

    def confirm(self, *pairs: AcceptedItem) -> Step[None]:
        verdict = Verdict(request_id="r", project="p", confirmed=pairs)
        step = self.ledger.verdicts([verdict])
        self.write(step)
        return step

    def tick(self, seconds: float = 0.0, *, heard: bool = True) -> list[object]:
        """Effects of the ticks of so much time."""
        effects: list[object] = []
        end = self.now + seconds
        while True:
            if heard:
                self.beat()
            step = self.ledger.tick()
            self.write(step)
            effects += step.effects
            if self.now >= end:
                return effects
            self.now += 0.5


@pytest.fixture
def node() -> Node:
    return Node()


def kinds(effects: object, kind: type) -> list[object]:
    return [e for e in effects if isinstance(e, kind)]  # type: ignore[attr-defined]


def test_nothing_is_announced_before_both_the_verdict_and_the_start(node: Node) -> None:
    (item,) = node.take(0)
    assert node.ledger.ready(item.sandbox_id).effects == ()
    (told,) = node.confirm(item).effects
    assert told == Announce("p", "r", "_INBOX.p.1", "n", (item,), {})
    assert node.confirm(item).effects == ()


def test_a_repeated_offer_gets_the_same_sandboxes_and_asks_for_no_room(node: Node) -> None:
    first = node.take(0, 1)
    node.room = 0
    assert node.take(0, 1) == first


def test_what_does_not_fit_is_refused_and_the_rest_accepted(node: Node) -> None:
    node.room = 2
    step = node.ledger.offer(offer(0, 1, 2), lambda n: Admission(2))
    assert [item.index for item in step.reply.accepted] == [0, 1]
    assert step.reply.refused is not None
    assert step.reply.refused.code == "no_capacity"
    assert [s.index for s in step.effects if isinstance(s, Start)] == [0, 1]


def test_a_mere_refusal_writes_nothing(node: Node) -> None:
    step = node.ledger.offer(offer(0), lambda n: Admission(0))
    assert (step.records, step.effects) == ((), ())


def test_offers_of_another_boot_or_an_older_epoch_are_refused(node: Node) -> None:
    node.ledger.whohas(WhoHas(request_id="r", project="p", epoch=3))
    late = node.ledger.offer(offer(0, epoch=2), lambda n: Admission(1))
    assert late.reply.refused is not None
    assert late.reply.refused.code == "conflict"
    stale = node.ledger.offer(offer(0, epoch=3, session="s0"), lambda n: Admission(1))
    assert stale.reply.refused is not None
    assert (stale.reply.refused.code, stale.reply.session) == ("unavailable", "s1")


def test_a_promise_outlives_the_process(node: Node) -> None:
    node.write(node.ledger.whohas(WhoHas(request_id="r", project="p", epoch=3)))
    node.start({})
    assert node.take(0, epoch=2) == []
    assert len(node.take(0, epoch=3)) == 1


def test_a_journal_that_takes_nothing_takes_the_acceptance_back(node: Node) -> None:
    step = node.ledger.offer(offer(0), lambda n: Admission(1))
    node.ledger.take_back(step)
    assert node.ledger.whohas(WhoHas(request_id="r", project="p", epoch=2)).reply.items == ()
    assert node.ledger.unannounced == 0


def test_without_a_lease_nothing_is_accepted_or_announced_again(node: Node) -> None:
    node.now += LEASE_S
    step = node.ledger.offer(offer(0), lambda n: Admission(1))
    assert step.reply.refused is not None
    assert step.reply.refused.code == "unavailable"
    with pytest.raises(Unavailable):
        node.ledger.announce_again(Verdict(request_id="r", project="p"))


def test_the_lease_counts_from_when_the_heartbeat_was_sent(node: Node) -> None:
    node.ledger.lease.sent(50)
    node.now += LEASE_S - 1
    node.ledger.lease.acked("s1", 50)
    assert node.ledger.lease.valid
    node.now += 1
    assert not node.ledger.lease.valid
    node.ledger.lease.acked("s1", 50)  # the same answer, late and twice
    node.ledger.lease.acked("s0", 51)  # another boot's
    assert not node.ledger.lease.valid


def test_an_item_that_nobody_confirms_is_asked_about_and_then_ends(node: Node) -> None:
    (item,) = node.take(0)
    effects = node.tick(LEASE_S - 1)
    assert len(kinds(effects, Inquire)) >= 5
    assert kinds(effects, Kill) == []
    (kill,) = kinds(node.tick(2.0), Kill)
    assert kill.sandbox_id == item.sandbox_id  # type: ignore[attr-defined]


def test_a_broken_lease_ends_what_was_not_announced_and_doubts_what_was(node: Node) -> None:
    told, untold = node.take(0, 1)
    node.confirm(told, untold)
    node.ledger.ready(told.sandbox_id)
    effects = node.tick(LEASE_S + 1, heard=False)
    assert [k.sandbox_id for k in kinds(effects, Kill)] == [untold.sandbox_id]  # type: ignore[attr-defined]
    (question, *_) = kinds(node.tick(), Inquire)
    held = question.inquiry.held[0]  # type: ignore[attr-defined]
    assert held.items == (told,)
    assert kinds(node.confirm(told).effects, Announce)  # it may not have been heard before


def test_a_lost_item_ends(node: Node) -> None:
    (item,) = node.take(0)
    step = node.ledger.verdicts([Verdict(request_id="r", project="p", lost=(item,))])
    assert isinstance(step.effects[0], Kill)
    assert not node.ledger.owns(item.sandbox_id)


def test_another_projects_verdict_touches_nothing(node: Node) -> None:
    (item,) = node.take(0)
    node.ledger.verdicts([Verdict(request_id="r", project="q", lost=(item,))])
    assert node.ledger.owns(item.sandbox_id)


def test_a_failed_start_is_placed_again_once_the_claim_is_known_to_name_it(node: Node) -> None:
    (item,) = node.take(0)
    error = ErrorReply.of(Unavailable("no"))
    assert node.ledger.failed(item.sandbox_id, error, retryable=True).effects == ()
    (ask,) = node.confirm(item).effects
    assert isinstance(ask, AskRetry)
    assert ask.request.place.attempt == 2
    assert ask.request.place.avoid == ("n1",)
    assert kinds(node.tick(1.0), AskRetry)  # until somebody has agreed
    step = node.ledger.retried("p", [item], again=[0])
    assert step.effects == ()
    node.write(step)
    assert kinds(node.tick(3.0), AskRetry) == []


def test_a_retry_that_nobody_takes_over_fails_to_the_caller(node: Node) -> None:
    (item,) = node.take(0)
    node.confirm(item)
    error = ErrorReply.of(Unavailable("no"))
    node.ledger.failed(item.sandbox_id, error, retryable=True)
    (told,) = node.ledger.retried("p", [item], again=[]).effects
    assert isinstance(told, Announce)
    assert told.failed == {0: error}


@pytest.mark.parametrize(("attempt", "retryable"), [(1, False), (MAX_ATTEMPTS, True)])
def test_a_start_that_cannot_be_tried_again_fails_to_the_caller(
    node: Node, attempt: int, retryable: bool
) -> None:
    (item,) = node.take(0, attempt=attempt)
    node.confirm(item)
    error = ErrorReply.of(Unavailable("no"))
    (told,) = node.ledger.failed(item.sandbox_id, error, retryable=retryable).effects
    assert isinstance(told, Announce)
    assert told.failed == {0: error}


def test_an_announcement_the_bus_refused_is_asked_for_again(node: Node) -> None:
    (item,) = node.take(0)
    node.ledger.ready(item.sandbox_id)
    (told,) = node.confirm(item).effects
    assert isinstance(told, Announce)
    node.ledger.announce_failed(told)
    assert kinds(node.tick(), Announce) == [told]
    assert kinds(node.tick(2.0), Announce) == []


def test_a_caller_that_comes_back_is_told_what_is_ready_and_later_what_becomes_so(
    node: Node,
) -> None:
    ready, starting = node.take(0, 1)
    node.confirm(ready, starting)
    node.ledger.ready(ready.sandbox_id)
    again = Verdict(
        request_id="r2", project="p", confirmed=(ready, starting), reply_to="_INBOX.p.2", nonce="m"
    )
    (told,) = node.ledger.announce_again(again).effects
    assert told == Announce("p", "r2", "_INBOX.p.2", "m", (ready,), {})
    both = node.ledger.ready(starting.sandbox_id).effects
    assert {e.reply_to for e in both if isinstance(e, Announce)} == {"_INBOX.p.1", "_INBOX.p.2"}


def test_long_settled_sandboxes_are_announced_again_for_the_driver_to_look_up(node: Node) -> None:
    pair = AcceptedItem(index=0, sandbox_id="n1_aaaaaa_aaaaaaaaaaaa")
    verdict = Verdict(request_id="r", project="p", confirmed=(pair,), reply_to="_INBOX.p.9")
    (told,) = node.ledger.announce_again(verdict).effects
    assert isinstance(told, Announce)
    assert told.ready == (pair,)


def test_a_withdrawal_also_ends_what_is_long_settled(node: Node) -> None:
    (item,) = node.take(0)
    old = AcceptedItem(index=1, sandbox_id="n1_aaaaaa_bbbbbbbbbbbb")
    step = node.ledger.withdraw(Verdict(request_id="r", project="p", lost=(item, old)))
    assert {k.sandbox_id for k in step.effects if isinstance(k, Kill)} == {
        item.sandbox_id, old.sandbox_id,
    }  # fmt: skip


def test_after_a_restart_work_goes_on_and_doubt_is_settled_first(node: Node) -> None:
    unstarted, ready, dead, accepted = node.take(0, 1, 2, 3)
    node.confirm(unstarted, ready, dead)
    step = node.start({ready.sandbox_id: Fate.RUNNING, dead.sandbox_id: Fate.DEAD})
    assert {s.sandbox_id for s in step.effects if isinstance(s, Start)} == {
        unstarted.sandbox_id, accepted.sandbox_id,
    }  # fmt: skip
    effects = node.tick()
    assert kinds(effects, Announce) == []
    (question,) = kinds(effects, Inquire)
    held = question.inquiry.held[0]  # type: ignore[attr-defined]
    assert set(held.items) == {unstarted, ready, accepted}
    assert held.ended == (dead,)
    (told,) = kinds(node.confirm(ready, dead).effects, Announce)
    assert told.ready == (ready,)  # type: ignore[attr-defined]
    assert told.failed[2].code == SandboxDead.code  # type: ignore[attr-defined]


def test_what_was_ready_and_confirmed_survives_a_restart_without_a_bus(node: Node) -> None:
    (item,) = node.take(0)
    node.confirm(item)
    node.start({item.sandbox_id: Fate.RUNNING})
    assert kinds(node.tick(3 * LEASE_S, heard=False), Kill) == []


def test_a_settled_request_leaves_nothing_behind(node: Node) -> None:
    (item,) = node.take(0)
    node.ledger.ready(item.sandbox_id)
    node.confirm(item)
    assert all(key.startswith(PREFIX) for key in node.journal)
    node.tick(BUDGET_S + 2 * LEASE_S + 1)
    assert node.journal == {}
    assert not node.ledger.owns(item.sandbox_id)


def test_a_clock_set_back_by_an_hour_keeps_nothing_for_an_hour(node: Node) -> None:
    (item,) = node.take(0)
    node.ledger.ready(item.sandbox_id)
    node.confirm(item)
    node.now -= 3600.0
    node.start({item.sandbox_id: Fate.RUNNING})
    node.tick()
    node.confirm(item)
    node.tick(BUDGET_S + 2 * LEASE_S + 1)
    assert node.journal == {}
