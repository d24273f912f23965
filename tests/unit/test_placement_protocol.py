"""The placement protocol against everything that can go wrong, in any order.

Hypothesis chooses one event at a time: a message arrives, is lost or repeated, an effect is carried
out or not, an edge or a scheduler dies between any two steps, a node is cut off, a watcher hears
nothing, a start fails, a caller gives up. At every moment nothing may be announced twice and no
sandbox that no claim names may outlive its lease. Then the world heals, and everybody who asked has
an answer, and nothing runs that nobody was given.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libdsec.wire.placement import claim_key

from .placement_world import PROJECT, Edge, World

pick = st.integers(0, 1 << 10)
which = st.integers(0, 2)


class PlacementMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    def edge(self, number: int) -> Edge:
        return self.world.edges[f"n{number % 3}"]

    # --- callers ---

    @rule(key=st.sampled_from("abc"), count=st.integers(1, 3))
    def create(self, key: str, count: int) -> None:
        if len(self.world.callers) < 6:
            self.world.create(key, count=count)

    @precondition(lambda self: self.world.callers)
    @rule(number=pick)
    def repeat(self, number: int) -> None:
        """The same key and arguments again."""
        callers = list(self.world.callers.values())
        if len(callers) < 6:
            request = callers[number % len(callers)].request
            self.world.create(request.key, count=request.count)

    @precondition(lambda self: self.world.callers)
    @rule(number=pick, keeps=st.booleans())
    def cancel(self, number: int, keeps: bool) -> None:
        callers = [c for c in self.world.callers.values() if not c.answered]
        if not callers:
            return
        caller = callers[number % len(callers)]
        caller.keeps, caller.cancel_heard = caller.keeps and keeps, False
        self.world.ask_cancel(caller)

    # --- schedulers ---

    @precondition(lambda self: self.world.queue)
    @rule(number=pick, scheduler=which)
    def deliver_request(self, number: int, scheduler: int) -> None:
        self.world.schedulers.deliver_request(number, scheduler)

    @precondition(lambda self: self.world.schedulers.tasks)
    @rule(number=pick, fate=st.sampled_from(["ok", "ok", "ok", "lost", "unknown"]))
    def step(self, number: int, fate: str) -> None:
        self.world.schedulers.step(
            self.world.schedulers.tasks[number % len(self.world.schedulers.tasks)], fate
        )

    @precondition(lambda self: self.world.schedulers.tasks)
    @rule(number=pick, count=st.integers(2, 6))
    def run_on(self, number: int, count: int) -> None:
        """One task goes some steps without being disturbed."""
        task = self.world.schedulers.tasks[number % len(self.world.schedulers.tasks)]
        for _ in range(count):
            if not task.over:
                self.world.schedulers.step(task)

    @rule(scheduler=which)
    def crash_scheduler(self, scheduler: int) -> None:
        self.world.schedulers.crash(scheduler)

    # --- messages ---

    @precondition(lambda self: self.world.letters)
    @rule(number=pick, scheduler=which)
    def deliver(self, number: int, scheduler: int) -> None:
        letters = self.world.letters
        self.world.deliver(letters.pop(number % len(letters)), which=scheduler)

    @precondition(lambda self: self.world.letters)
    @rule(scheduler=which)
    def deliver_all(self, scheduler: int) -> None:
        letters, self.world.letters = self.world.letters, []
        for letter in letters:
            self.world.deliver(letter, which=scheduler)

    @precondition(lambda self: self.world.letters)
    @rule(number=pick)
    def lose(self, number: int) -> None:
        letters = self.world.letters
        letters.pop(number % len(letters))

    @precondition(lambda self: self.world.letters)
    @rule(number=pick)
    def repeat_letter(self, number: int) -> None:
        letters = self.world.letters
        if len(letters) < 60:
            letters.append(letters[number % len(letters)])

    # --- edges ---

    @rule(number=which)
    def sync(self, number: int) -> None:
        if self.edge(number).up:
            self.edge(number).sync()

    @rule(number=which, fate=st.sampled_from(["ready", "ready", "again", "for good", "dies"]))
    def progress(self, number: int, fate: str) -> None:
        edge = self.edge(number)
        for sandbox in list(edge.host.values()):
            if fate == "dies" and sandbox.ready:
                edge.died(sandbox.sandbox_id)
            elif fate == "ready" and not sandbox.ready:
                edge.started(sandbox.sandbox_id)
            elif fate in ("again", "for good") and not sandbox.ready:
                edge.start_failed(sandbox.sandbox_id, retryable=fate == "again")

    @rule(number=which, skew_s=st.sampled_from([0, 3600, -3600]))
    def crash_edge(self, number: int, skew_s: int) -> None:
        edge = self.edge(number)
        if edge.up:
            edge.crash()
        else:
            edge.wall_skew_ms += skew_s * 1000
            edge.start()

    @rule(number=which)
    def cut_off_or_reconnect(self, number: int) -> None:
        self.edge(number).connected = not self.edge(number).connected

    @rule(number=which, room=st.sampled_from([0, 1, 100]))
    def fill(self, number: int, room: int) -> None:
        self.edge(number).room = room

    # --- time ---

    @rule(seconds=st.sampled_from([0.25, 0.25, 1.0, 1.0, 3.0, 12.0]), heard=st.booleans())
    def pass_time(self, seconds: float, heard: bool) -> None:
        self.world.advance(seconds, heard=heard or seconds < 3.0)

    @rule()
    def calm(self) -> None:
        """A while in which what is up works."""
        self.world.fair(1.0)

    @invariant()
    def never_two(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        world = self.world
        for edge in world.edges.values():
            edge.room = 100
        world.heal()
        world.fair(75.0)
        self.everybody_has_an_answer()
        self.nothing_is_left_over()
        self.nothing_was_taken_away()

    def everybody_has_an_answer(self) -> None:
        for caller in self.world.callers.values():
            assert caller.answered or caller.cancel_heard, caller
        assert not self.world.schedulers.tasks
        assert all(queued.gone for queued in self.world.queue)

    def nothing_is_left_over(self) -> None:
        """What runs is held by a caller: nobody who gave up or was refused has left anything."""
        held = {s for caller in self.world.callers.values() for s in caller.holds}
        running = {s for edge in self.world.edges.values() for s in edge.host}
        assert running <= held, running - held

    def nothing_was_taken_away(self) -> None:
        """A sandbox that a caller has was not killed, unless somebody with its key gave up, or was
        told that its node is lost (it may have heard of the sandbox just before)."""
        for key in "abc":
            callers = [c for c in self.world.callers.values() if c.request.key == key]
            if len(callers) == 1 and callers[0].keeps and callers[0].kept:
                assert not set(callers[0].kept) & self.world.killed
            claim, _ = self.world.bucket.get(claim_key(PROJECT, key), (None, 0))
            told = claim is not None and claim.failed
            if told or any(c.cancelled or c.errors or c.failed for c in callers):
                continue
            for caller in callers:
                assert not set(caller.has.values()) & self.world.killed, caller


# DSEC_DEEP=5000 runs so many longer examples; DSEC_NOSHRINK=1 reports the first failure as it is.
deep = int(os.environ.get("DSEC_DEEP", "0"))
SHRINK = () if os.environ.get("DSEC_NOSHRINK") else (Phase.shrink,)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, *SHRINK)
PlacementMachine.TestCase.settings = settings(
    max_examples=deep or 250,
    stateful_step_count=120 if deep else 60,
    deadline=None,
    report_multiple_bugs=False,
    phases=PHASES,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestPlacementProtocol = pytest.mark.timeout(1800 if deep else 120)(PlacementMachine.TestCase)
