"""Idle time, lifetime and paused time: which of them runs when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libdsec.wire.sandbox import Lifetime
from services.edge.clocks import Clocks, Limit

LIFETIME = Lifetime(idle_timeout_s=10, max_lifetime_s=100, max_paused_s=50)


def test_idle_expires_only_after_its_whole_limit_without_activity() -> None:
    clocks = Clocks(LIFETIME, 0)
    assert clocks.expired(9.9) is None
    assert clocks.expired(10) is Limit.IDLE
    clocks.begin(9)
    assert clocks.expired(99) is None
    clocks.end(60)
    assert clocks.expired(69.9) is None
    assert clocks.expired(70) is Limit.IDLE


def test_idle_stands_still_while_one_of_two_commands_runs() -> None:
    clocks = Clocks(LIFETIME, 0)
    clocks.begin(1)
    clocks.begin(2)
    clocks.end(3)
    assert clocks.expired(90) is None
    clocks.end(90)
    assert clocks.idle.read(95) == 5


def test_paused_time_counts_neither_as_idle_nor_as_lifetime() -> None:
    clocks = Clocks(LIFETIME, 0)
    clocks.pause(5)
    assert clocks.expired(54) is None
    assert clocks.expired(55) is Limit.PAUSED
    assert clocks.resume(45) == 40
    assert clocks.life.read(45) == 5
    assert clocks.idle.read(45) == 0
    assert clocks.paused.read(45) == 0


def test_lifetime_expires_although_a_command_runs() -> None:
    clocks = Clocks(LIFETIME, 0)
    clocks.begin(0)
    assert clocks.expired(100) is Limit.LIFETIME


def test_idle_keeps_what_it_had_while_the_bus_is_away() -> None:
    clocks = Clocks(LIFETIME, 0)
    clocks.set_bus(False, 6)
    assert clocks.expired(90) is None
    clocks.set_bus(True, 90)
    assert clocks.expired(93.9) is None
    assert clocks.expired(94) is Limit.IDLE


def test_a_successor_goes_on_with_the_paused_time_of_its_predecessor() -> None:
    clocks = Clocks(LIFETIME, 1000, lived_s=7)
    clocks.pause(1000, already_s=30)
    assert clocks.expired(1019) is None
    assert clocks.expired(1020) is Limit.PAUSED
    assert clocks.resume(1010) == 40
    assert clocks.life.read(1010) == 7


EVENTS = st.lists(
    st.tuples(
        st.floats(0.01, 30), st.sampled_from(["begin", "end", "pause", "resume", "down", "up"])
    ),
    max_size=40,
)


@given(EVENTS)
def test_no_limit_runs_out_before_the_next_check(events: list[tuple[float, str]]) -> None:
    """The promise that lets a timer be armed once and never be touched by activity."""
    clocks, now, paused = Clocks(LIFETIME, 0), 0.0, False
    check_at = now + clocks.next_check_s(now)
    for wait, event in events:
        now += wait
        if now >= check_at:
            if clocks.expired(now) is not None:
                return
            check_at = now + clocks.next_check_s(now)
        assert clocks.expired(now) is None
        if event == "begin" and not paused:
            clocks.begin(now)
        elif event == "end" and clocks.busy:
            clocks.end(now)
        elif event == "pause" and not paused:
            paused = True
            clocks.pause(now)
        elif event == "resume" and paused:
            paused = False
            clocks.resume(now)
        elif event in {"up", "down"}:
            clocks.set_bus(event == "up", now)


def test_a_lowered_limit_is_seen_at_once() -> None:
    clocks = Clocks(LIFETIME, 0)
    clocks.set_limits(LIFETIME.model_copy(update={"idle_timeout_s": 2.0}))
    assert clocks.expired(1) is None
    assert clocks.expired(3) is Limit.IDLE
    assert clocks.next_check_s(1) == pytest.approx(1)
