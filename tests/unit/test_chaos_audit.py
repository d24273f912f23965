"""The judge of the fault runs is judged: it must see each kind of thing that may not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from libdsec import NoCapacity, Sandbox
from libdsec.wire.sandbox import Backend, SandboxInfo, State
from libhost.paths import slot_of
from services.edge.fault import Point
from tests.chaos.audit import judge_requests
from tests.chaos.faults import Round
from tests.chaos.host import NodeCensus
from tests.chaos.processes import Disturbance

A, B = "n1_aaaaaa_aaaaaaaaaaaa", "n1_aaaaaa_bbbbbbbbbbbb"


def census(**found: set[str]) -> NodeCensus:
    places = {"process": {A, B}, "cgroup": {A, B}, "run directory": {slot_of(A), slot_of(B)},
              "interface": {slot_of(A)}}  # fmt: skip
    return NodeCensus("n1", {k: frozenset(v) for k, v in {**places, **found}.items()})


def test_a_host_that_holds_what_lives_is_right() -> None:
    assert list(census().differences([A, B])) == []


@pytest.mark.parametrize(
    ("place", "found", "finding"),
    [
        ("process", {A}, f"{B} has no process"),
        ("cgroup", {A, B, "n1_x_y"}, "cgroup of n1_x_y is left over"),
        ("run directory", {slot_of(A), slot_of(B), "abcdefghij"}, "of abcdefghij is left over"),
        ("interface", {slot_of(A), "abcdefghij"}, "interface of abcdefghij is left over"),
    ],
)
def test_a_host_that_holds_more_or_less_is_found_out(
    place: str, found: set[str], finding: str
) -> None:
    [said] = census(**{place: found}).differences([A, B])
    assert finding in said


def played(*told: str, stopped: tuple[str, ...] = (), failed: tuple[str, ...] = ()) -> Round:
    done = Round(Point.DURING_STOP, 1, Disturbance("burst"))
    done.sandboxes = [cast("Sandbox", SimpleNamespace(id=sandbox_id)) for sandbox_id in told]
    done.stopped = set(stopped)
    done.errors = [NoCapacity("full", request_id=request) for request in failed]
    return done


def lives(sandbox_id: str, request_id: str) -> SandboxInfo:
    return SandboxInfo(sandbox_id=sandbox_id, node="n1", backend=Backend.CONTAINER,
                       state=State.READY, request_id=request_id)  # fmt: skip


def test_one_sandbox_or_one_error_is_right() -> None:
    rounds = [played(A, B, stopped=(B,), failed=("r3",))]
    assert judge_requests(rounds, [lives(A, "r1")]) == []


@pytest.mark.parametrize(
    ("rounds", "alive", "finding"),
    [
        ([played(A, B)], [lives(A, "r1"), lives(B, "r1")], "2 sandboxes for request r1"),
        ([played(failed=("r1",))], [lives(A, "r1")], "told of an error"),
        ([played()], [lives(A, "r1")], "told of nothing"),
        ([played(A, stopped=(A,))], [lives(A, "r1")], f"{A} was stopped but lives"),
        ([played(A)], [], f"{A} is gone"),
    ],
)
def test_anything_else_is_found_out(
    rounds: list[Round], alive: list[SandboxInfo], finding: str
) -> None:
    [said] = judge_requests(rounds, alive)
    assert finding in said
