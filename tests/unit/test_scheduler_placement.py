"""Choosing nodes: sampling, load with the overlay, room, rest, and what is reported as dropped."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from libdsec.errors import Conflict, NoCapacity
from libdsec.wire.error import ErrorReply
from libdsec.wire.node import Heartbeat, Load, NodeState, NodeView
from libdsec.wire.placement import AcceptedItem, OfferReply
from libdsec.wire.sandbox import SandboxSpec
from services.scheduler.cluster import ClusterState
from services.scheduler.filters import Need

NEED = Need(SandboxSpec(image="base"))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def beat(node: str, *, seq: int = 1, session: str = "s", running: int = 0, room: int = 100,
         **changes: object) -> Heartbeat:  # fmt: skip
    values: dict[str, object] = {
        "node": node, "incarnation": "aaaaaa", "session": session, "seq": seq,
        "backends": ("container",), "policy_ready": True, "running": running,
        "max_sandboxes": room, "load": Load(sandboxes=running / room),
    }  # fmt: skip
    return Heartbeat.model_validate(values | changes)


def cluster(*beats: Heartbeat, k: int = 3, clock: Clock | None = None) -> ClusterState:
    made = ClusterState(clock=clock or Clock(), rng=Random(7), k=k)
    show(made, *beats)
    return made


def show(made: ClusterState, *beats: Heartbeat) -> None:
    made.show([NodeView(heartbeat=b, state=NodeState.LIVE) for b in beats])


def accepted(count: int, *, seq: int, session: str = "s") -> OfferReply:
    items = tuple(AcceptedItem(index=i, sandbox_id=f"x{i}") for i in range(count))
    return OfferReply(accepted=items, session=session, heartbeat_seq=seq)


def test_items_go_to_the_least_loaded_and_each_counts_for_the_next() -> None:
    made = cluster(beat("a", running=10), beat("b", running=0))
    assert made.choose(NEED, 30, ()).groups == {"b": 20, "a": 10}


def test_a_reading_of_memory_does_not_send_a_burst_to_one_of_two_idle_nodes() -> None:
    idle = beat("a", room=1600, load=Load(memory=0.251))
    same = beat("b", room=1600, load=Load(memory=0.249))
    assert cluster(idle, same).choose(NEED, 20, ()).groups == {"a": 10, "b": 10}


def test_a_node_that_is_really_fuller_is_left_alone() -> None:
    full = beat("a", room=1600, load=Load(memory=0.40))
    idle = beat("b", room=1600, load=Load(memory=0.25))
    assert cluster(full, idle).choose(NEED, 20, ()).groups == {"b": 20}


def test_sampling_spreads_over_many_nodes_far_better_than_chance() -> None:
    beats = [beat(f"n{i}", room=1000) for i in range(160)]
    spread = {k: max(cluster(*beats, k=k).choose(NEED, 16_000, ()).groups.values()) for k in (1, 3)}
    assert spread[3] <= 104  # the mean is 100
    assert spread[1] >= 120


def test_room_bounds_what_a_node_is_given_and_the_rest_is_reported() -> None:
    made = cluster(beat("a", running=97), beat("b", running=99))
    choice = made.choose(NEED, 10, ())
    assert choice.groups == {"a": 3, "b": 1}
    assert choice.dropped == {"full": 2}
    assert not made.choose(NEED, 0, ()).possible


def test_placements_count_until_the_view_shows_them_by_sequence_number() -> None:
    made = cluster(beat("a", seq=5, room=4))
    assert made.choose(NEED, 3, ()).groups == {"a": 3}
    made.answered("a", 3, accepted(3, seq=6))
    show(made, beat("a", seq=6, room=4))  # sent before it was accepted
    assert made.choose(NEED, 3, ()).groups == {"a": 1}
    made.answered("a", 1, OfferReply(session="s"))
    show(made, beat("a", seq=7, room=4, running=3))
    assert made.choose(NEED, 3, ()).groups == {"a": 1}


def test_a_restarted_edge_shows_everything_it_has() -> None:
    made = cluster(beat("a", seq=50, room=4))
    made.choose(NEED, 3, ())
    made.answered("a", 3, accepted(3, seq=50))
    show(made, beat("a", seq=1, session="s2", room=4, running=1))
    assert made.choose(NEED, 4, ()).groups == {"a": 3}


def test_a_refused_offer_frees_what_it_had_reserved() -> None:
    made = cluster(beat("a", room=4))
    made.choose(NEED, 4, ())
    made.answered("a", 4, OfferReply(session="s"))
    assert made.choose(NEED, 4, ()).groups == {"a": 4}


def test_an_unanswered_offer_counts_for_a_moment_only() -> None:
    clock = Clock()
    made = cluster(beat("a", room=4), clock=clock)
    made.choose(NEED, 4, ())
    made.answered("a", 4, None)
    assert not made.choose(NEED, 1, ()).groups
    clock.now = 5.0
    show(made, beat("a", seq=2, room=4))
    assert made.choose(NEED, 4, ()).groups == {"a": 4}


def test_a_node_that_refused_rests_and_the_choice_says_so() -> None:
    clock = Clock()
    made = cluster(beat("a"), beat("b"), clock=clock)
    refusal = ErrorReply.of(NoCapacity("full", retry_after_s=2.0))
    made.answered("a", 1, OfferReply(refused=refusal, session="s"))
    choice = made.choose(NEED, 4, ())
    assert choice.groups == {"b": 4}
    assert choice.dropped == {"refused_lately": 1}
    clock.now = 2.1
    assert set(made.choose(NEED, 12, ()).groups) == {"a", "b"}


def test_an_epochs_refusal_is_no_reason_to_rest() -> None:
    made = cluster(beat("a"))
    refusal = ErrorReply.of(Conflict("offer of epoch 1 is refused"))
    made.answered("a", 1, OfferReply(refused=refusal, session="s"))
    assert made.choose(NEED, 1, ()).groups == {"a": 1}


def test_nodes_asked_already_are_excluded_and_avoided_ones_are_the_last_resort() -> None:
    made = cluster(beat("a"), beat("b"), beat("c"))
    avoiding = Need(SandboxSpec(image="base"), avoid=frozenset({"b"}))
    assert made.choose(avoiding, 6, {"a"}).groups == {"c": 6}
    choice = made.choose(avoiding, 6, {"a", "c"})
    assert choice.groups == {"b": 6}
    assert choice.dropped == {"asked_already": 2}
    assert (choice.open, made.choose(avoiding, 1, {"a", "b", "c"}).open) == (1, 0)


def test_the_session_an_edge_states_itself_wins_until_the_view_has_a_newer_one() -> None:
    made = cluster(beat("a", session="old"))
    made.answered("a", 1, OfferReply(session="new"))
    assert made.session("a") == "new"
    show(made, beat("a", session="newest"))
    assert made.session("a") == "newest"


def test_creates_in_flight_weigh_against_what_the_node_can_start_at_once() -> None:
    slow = beat("slow", max_creating=4, room=10_000)
    fast = beat("fast", max_creating=40, room=10_000)
    groups = cluster(slow, fast).choose(NEED, 44, ()).groups
    assert groups == {"slow": 4, "fast": 40}


def test_utilisation_is_the_mean_of_live_local_nodes_with_the_overlay() -> None:
    made = cluster(beat("a", running=40), beat("b", running=60), beat("c", pool="cloud"))
    assert made.utilisation == 0.5
    made.choose(NEED, 20, ())
    assert made.utilisation == pytest.approx(0.6)


def test_equal_nodes_share_equally_whatever_their_order() -> None:
    beats = [beat(f"n{i}") for i in range(3)]
    groups = cluster(*beats).choose(NEED, 30, ()).groups
    assert Counter(groups.values()) == {10: 3}
