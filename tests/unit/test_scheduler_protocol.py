"""Single turns of the scheduler's half of the protocol, each against a bucket that others write."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from libdsec.errors import Conflict, DSecError, InvalidArgument, NoCapacity, SandboxDead
from libdsec.wire.error import ErrorReply
from libdsec.wire.layer import ResolvedLayers
from libdsec.wire.node import Heartbeat, NodeState, NodeView
from libdsec.wire.placement import (
    AcceptedItem,
    Announcement,
    CancelRequest,
    Claim,
    ClaimState,
    Held,
    OfferReply,
    PlaceRequest,
    Progress,
    RetryRequest,
    claim_key,
)
from libdsec.wire.sandbox import SandboxSpec
from services.scheduler import effects as e
from services.scheduler.attempt import Job
from services.scheduler.claims import digest_of
from services.scheduler.cluster import ClusterState
from services.scheduler.protocol import place
from services.scheduler.rulings import cancel, free, rule

from .placement_schedulers import BASE

KEY = claim_key("p", "k")


def request(count: int = 1, request_id: str = "r1", **changes: object) -> PlaceRequest:
    made = PlaceRequest(
        request_id=request_id, key="k", reply_to="_INBOX.p.1", nonce="n", count=count,
        budget_ms=30_000, spec=SandboxSpec(image="base"),
    )  # fmt: skip
    return made.model_copy(update=changes)


def item(index: int, node: str = "n1", letter: str = "a") -> AcceptedItem:
    return AcceptedItem(index=index, sandbox_id=f"{node}_aaaaaa_{letter * 12}")


class Scene:
    """A bucket, two nodes, and a script for what the edges answer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.claim: Claim | None = None
        self.revision = 0
        self.done: list[e.Effect[Any]] = []
        self.script: dict[type, Callable[[Any], Any]] = {}
        self.cluster = ClusterState(clock=lambda: self.now, rng=Random(1))
        self.see(NodeState.LIVE)

    def see(self, state: NodeState) -> None:
        beats = [
            Heartbeat(
                node=node, incarnation="aaaaaa", session="s", seq=1, backends=("container",),
                policy_ready=True,
            )
            for node in ("n1", "n2")
        ]  # fmt: skip
        self.cluster.show([NodeView(heartbeat=beat, state=state) for beat in beats])

    def run(self, steps: Any) -> Any:
        result: Any = None
        while True:
            try:
                effect = steps.send(result)
            except StopIteration as stop:
                return stop.value
            self.done.append(effect)
            result = self._answer(effect)

    def place(self, wanted: PlaceRequest, *, deliveries: int = 1, left_s: float = 30.0) -> Any:
        job = Job("p", wanted, digest_of(wanted), deliveries, self.now + left_s)
        return self.run(place(job, self.cluster))

    def write(self, claim: Claim) -> int:
        self.claim, self.revision = claim, self.revision + 1
        return self.revision

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.done if isinstance(effect, kind)]

    def said(self, kind: type) -> list[Any]:
        return [a.message for a in self.of(e.Answer) if isinstance(a.message, kind)]

    def _answer(self, effect: Any) -> Any:
        if type(effect) in self.script:
            return self.script[type(effect)](effect)
        match effect:
            case e.ReadClaim():
                return e.Stored(self.claim, self.revision) if self.claim else None
            case e.WriteClaim(_, claim, revision):
                return self.write(claim) if revision == self.revision else None
            case e.ResolveLayers():
                return ResolvedLayers(base=BASE)
            case e.ChoosePools():
                return frozenset({"local"})
            case e.MakeOffers(offers, _):
                return {node: accept(node, offer.items) for node, offer in offers.items()}
            case e.AskWhoHas():
                return ()
            case e.AnnounceAgain(verdicts, _) | e.Withdraw(verdicts, _):
                return frozenset(verdicts)
            case _:
                return None


def accept(node: str, items: tuple[int, ...]) -> OfferReply:
    return OfferReply(accepted=tuple(item(i, node) for i in items), session="s")


def test_the_claim_is_stored_before_any_offer_and_before_any_verdict() -> None:
    scene = Scene()
    assert isinstance(scene.place(request()), e.Done)
    order = [type(x) for x in scene.done if not isinstance(x, e.ResolveLayers | e.ChoosePools)]
    assert order == [e.WriteClaim, e.MakeOffers, e.WriteClaim, e.Tell]
    assert scene.claim is not None
    assert scene.claim.state is ClaimState.PLACED


def test_an_unanswered_offer_moves_the_epoch_and_its_items_are_looked_for() -> None:
    scene = Scene()
    silent = iter([True, False])
    scene.script[e.MakeOffers] = lambda x: {
        node: None if next(silent) else accept(node, offer.items)
        for node, offer in x.offers.items()
    }
    scene.place(request())
    (ask,) = scene.of(e.AskWhoHas)
    first, second = scene.of(e.MakeOffers)
    assert ask.expect == frozenset(first.offers)
    assert [next(iter(x.offers.values())).epoch for x in (first, second)] == [1, 2]
    assert not set(first.offers) & set(second.offers)


def test_a_claim_that_others_moved_on_is_left_alone() -> None:
    scene = Scene()

    def meanwhile(effect: Any) -> Any:
        assert scene.claim is not None
        scene.write(scene.claim.model_copy(update={"epoch": 2}))
        return {node: accept(node, offer.items) for node, offer in effect.offers.items()}

    scene.script[e.MakeOffers] = meanwhile
    assert isinstance(scene.place(request()), e.Park)
    assert scene.of(e.Tell) == []
    assert scene.claim is not None
    assert scene.claim.items == ()


def test_a_start_that_failed_before_the_claim_was_complete_is_not_named_again() -> None:
    """Accepted, asked about, named, failed and freed, all before the slow scheduler's write."""
    scene = Scene()
    wanted = request()

    def meanwhile(effect: Any) -> Any:
        ((node, offer),) = effect.offers.items()
        (mine,) = accept(node, offer.items).accepted
        held = Held(request_id="r1", project="p", key="k", epoch=1, items=(mine,))
        other = Scene()
        other.claim, other.revision = scene.claim, scene.revision
        assert other.run(rule(held)).confirmed == (mine,)
        retry = RetryRequest(
            request_id="r1", project="p", items=(mine,),
            reason=ErrorReply(code="unavailable", message="no"),
            place=wanted.model_copy(update={"attempt": 2}),
        )  # fmt: skip
        assert other.run(free(retry)).again == (0,)
        scene.claim, scene.revision = other.claim, other.revision
        return {node: OfferReply(accepted=(mine,), session="s")}

    scene.script[e.MakeOffers] = meanwhile
    assert isinstance(scene.place(wanted), e.Park)
    assert scene.claim is not None
    assert scene.claim.items == ()


def test_items_an_edge_asked_about_meanwhile_are_merged() -> None:
    scene = Scene()

    def meanwhile(effect: Any) -> Any:
        assert scene.claim is not None
        ((node, offer),) = effect.offers.items()
        named = scene.claim.model_copy(update={"items": (item(0, node),)})
        scene.write(named)
        return {node: accept(node, offer.items)}

    scene.script[e.MakeOffers] = meanwhile
    assert isinstance(scene.place(request()), e.Done)
    assert scene.claim is not None
    assert scene.claim.state is ClaimState.PLACED
    assert len(scene.claim.items) == 1


def test_an_inquiry_of_an_older_epoch_takes_nothing_over() -> None:
    scene = Scene()
    scene.write(Claim(request_id="r1", digest="d", epoch=2, state=ClaimState.PLACING, count=1))
    held = Held(request_id="r1", project="p", key="k", epoch=1, items=(item(0),))
    verdict = scene.run(rule(held))
    assert (verdict.confirmed, verdict.lost) == ((), ())  # it may yet be found by a WHOHAS
    assert scene.claim is not None
    assert scene.claim.items == ()


def test_what_a_cancelled_request_left_behind_is_withdrawn_by_its_successor() -> None:
    scene = Scene()
    scene.write(
        Claim(
            request_id="r0", digest=digest_of(request()), epoch=3, state=ClaimState.CANCELLED,
            condemned=(item(0, "n1", "z"),),
        )
    )  # fmt: skip
    scene.place(request())
    (withdraw,) = scene.of(e.Withdraw)
    assert withdraw.verdicts["n1"].lost == (item(0, "n1", "z"),)
    assert scene.claim is not None
    assert (scene.claim.condemned, scene.claim.epoch) == ((), 4)


def test_a_cancel_keeps_what_the_caller_keeps() -> None:
    scene = Scene()
    kept, dropped = item(0, "n1"), item(1, "n2")
    scene.write(
        Claim(
            request_id="r1", digest="d", epoch=1, state=ClaimState.WAITING, count=3,
            items=(kept, dropped),
        )
    )  # fmt: skip
    ask = CancelRequest(request_id="r1", key="k", keep=(kept.sandbox_id,))
    assert scene.run(cancel("p", ask)) == ()
    assert scene.claim is not None
    assert (scene.claim.state, scene.claim.items) == (ClaimState.PLACED, (kept,))
    assert set(scene.claim.failed) == {1, 2}
    assert scene.of(e.Withdraw)[0].verdicts["n2"].lost == (dropped,)


def test_a_cancel_of_what_was_never_delivered_is_remembered() -> None:
    scene = Scene()
    scene.run(cancel("p", CancelRequest(request_id="r1", key="k")))
    assert isinstance(scene.place(request()), e.Done)
    assert scene.of(e.MakeOffers) == []


def test_a_node_cannot_have_placed_what_nobody_asked_for() -> None:
    scene = Scene()
    scene.place(request())
    assert scene.claim is not None
    other = request(spec=SandboxSpec(image="base", user="root"))
    retry = RetryRequest(
        request_id="r1", project="p", items=scene.claim.items,
        reason=ErrorReply(code="unavailable", message="no"), place=other,
    )  # fmt: skip
    before = scene.claim
    assert scene.run(free(retry)).again == ()
    assert scene.claim == before
    assert scene.of(e.Republish) == []


def test_a_retry_said_twice_puts_the_request_back_once() -> None:
    scene = Scene()
    scene.place(request())
    assert scene.claim is not None
    retry = RetryRequest(
        request_id="r1", project="p", items=scene.claim.items,
        reason=ErrorReply(code="unavailable", message="no"),
        place=request(attempt=2),
    )  # fmt: skip
    assert [scene.run(free(retry)).again for _ in range(2)] == [(0,), (0,)]
    assert len({x.message_id for x in scene.of(e.Republish)}) == 1


def test_refusals_that_no_wait_can_change_are_passed_on_at_once() -> None:
    scene = Scene()
    refusal = ErrorReply.of(InvalidArgument("user 'x' is not in the image"))
    scene.script[e.MakeOffers] = lambda x: {
        node: OfferReply(refused=refusal, session="s") for node in x.offers
    }
    assert isinstance(scene.place(request()), e.Done)
    (error,) = scene.said(InvalidArgument)
    assert "user 'x'" in str(error)


def test_refusals_for_now_make_it_wait_and_say_why() -> None:
    scene = Scene()
    refusal = ErrorReply.of(NoCapacity("memory is short"))
    scene.script[e.MakeOffers] = lambda x: {
        node: OfferReply(refused=refusal, session="s") for node in x.offers
    }
    outcome = scene.place(request())
    assert isinstance(outcome, e.Park)
    assert outcome.delay_s <= 1.0
    (progress,) = scene.said(Progress)
    assert "memory is short" in progress.reason
    assert scene.claim is not None
    assert scene.claim.state is ClaimState.WAITING


def test_the_last_word_comes_before_the_callers_own_clock_runs_out() -> None:
    scene = Scene()
    scene.see(NodeState.SUSPECT)
    assert isinstance(scene.place(request(), left_s=0.2), e.Done)
    (error,) = scene.said(NoCapacity)
    assert "suspect 2" in str(error)


def test_a_waiting_request_costs_no_write_while_nobody_can_take_it() -> None:
    scene = Scene()
    scene.see(NodeState.SUSPECT)
    scene.place(request())
    scene.done.clear()
    scene.place(request(), deliveries=2)
    assert scene.of(e.WriteClaim) == []
    assert len(scene.of(e.ReadClaim)) == 1


def test_what_was_placed_of_many_is_told_while_the_rest_waits() -> None:
    scene = Scene()
    refusal = ErrorReply.of(NoCapacity("full"))
    scene.script[e.MakeOffers] = lambda x: {
        node: OfferReply(
            accepted=accept(node, offer.items[:1]).accepted, refused=refusal, session="s"
        )
        for node, offer in x.offers.items()
    }
    assert isinstance(scene.place(request(count=6)), e.Park)
    assert {x.node for x in scene.of(e.Tell)} == {"n1", "n2"}
    assert scene.claim is not None
    assert len(scene.claim.items) == 2


def test_the_rest_fails_in_place_when_the_time_is_over() -> None:
    scene = Scene()
    scene.write(
        Claim(
            request_id="r1", digest=digest_of(request(count=2)), epoch=1,
            state=ClaimState.WAITING, count=2, items=(item(0),),
        )
    )  # fmt: skip
    scene.see(NodeState.SUSPECT)
    scene.place(request(count=2), deliveries=9, left_s=0.1)
    (message,) = scene.said(Announcement)
    assert set(message.failed) == {1}
    assert scene.claim is not None
    assert scene.claim.state is ClaimState.PLACED


def test_a_repeated_request_whose_layers_are_gone_still_gets_its_sandbox() -> None:
    scene = Scene()
    scene.place(request())
    scene.script[e.ResolveLayers] = lambda _: InvalidArgument("no such layer")
    scene.done.clear()
    assert isinstance(scene.place(request(request_id="r2")), e.Done)
    assert scene.said(DSecError) == []
    assert len(scene.of(e.AnnounceAgain)) == 1


def test_other_arguments_conflict() -> None:
    scene = Scene()
    scene.place(request())
    scene.place(request(count=2, request_id="r2"))
    assert len(scene.said(Conflict)) == 1


def test_a_lost_nodes_sandbox_is_dead_to_a_new_caller_and_undecided_to_the_old_one() -> None:
    scene = Scene()
    scene.place(request())
    scene.see(NodeState.LOST)
    scene.script[e.AnnounceAgain] = lambda _: frozenset()
    scene.place(request(), deliveries=2)  # redelivered: its caller may have it
    assert scene.said(Announcement) == []
    assert scene.claim is not None
    assert len(scene.claim.items) == 1
    scene.place(request(request_id="r2"))
    (message,) = scene.said(Announcement)
    assert message.failed[0].code == SandboxDead.code
    assert scene.claim.items == ()
