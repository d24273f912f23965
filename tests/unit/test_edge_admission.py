"""The node's last word: which fact refuses what, and that a refusal names it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libdsec.errors import InvalidArgument, NoCapacity, Unavailable, Unsupported
from libdsec.wire.sandbox import Backend, Qos, Resources, SandboxSpec
from services.edge.admission import NodeFacts, OperatingPoint, admit, refuse

SPEC = SandboxSpec(image="base@1")
POINT = OperatingPoint()
FREE = NodeFacts(
    available_memory_mib=16_000,
    memory_pressure=0.0,
    free_disk_mib=100_000,
    free_pids=30_000,
    cores=8,
    sandboxes=0,
    creating=0,
    creating_memory_mib=0,
    committed_ls_cpus=0.0,
    policy_ready=True,
)


def test_a_free_node_takes_it() -> None:
    assert refuse(FREE, POINT, SPEC) is None


@pytest.mark.parametrize(
    ("change", "resource"),
    [
        ({"available_memory_mib": 540}, "memory"),
        ({"creating_memory_mib": 16_000 * 32}, "memory"),
        ({"memory_pressure": 20.1}, "memory"),
        ({"free_disk_mib": 1024}, "disk"),
        ({"free_pids": 1030}, "pids"),
        ({"creating": 256}, "creates in flight"),
        ({"sandboxes": 3200}, "sandboxes"),
    ],
)
def test_a_refusal_names_the_resource_and_when_to_retry(
    change: dict[str, float], resource: str
) -> None:
    refusal = refuse(replace(FREE, **change), POINT, SPEC)  # type: ignore[arg-type]
    assert isinstance(refusal, NoCapacity)
    assert resource in refusal.message
    assert refusal.retry_after_s is not None


@pytest.mark.parametrize(
    "change", [{"cordoned": True}, {"draining": True}, {"policy_ready": False}]
)
def test_a_closed_node_refuses_and_says_why(change: dict[str, bool]) -> None:
    refusal = refuse(replace(FREE, **change), POINT, SPEC)  # type: ignore[arg-type]
    assert isinstance(refusal, Unavailable)
    assert any(word in refusal.message for word in ("cordoned", "draining", "policy"))


def test_best_effort_is_not_bound_by_promised_cpus_but_latency_sensitive_is() -> None:
    facts = replace(FREE, committed_ls_cpus=7.0)
    assert refuse(facts, POINT, SPEC) is None
    refusal = refuse(facts, POINT, SPEC.model_copy(update={"qos": Qos.LATENCY_SENSITIVE}))
    assert isinstance(refusal, NoCapacity)
    assert "7 of 8 promised" in refusal.message


def test_a_group_is_taken_as_far_as_it_fits() -> None:
    spec = SPEC.model_copy(update={"qos": Qos.LATENCY_SENSITIVE, "resources": Resources(cpus=3.0)})
    fitting, refusal = admit(FREE, POINT, spec, 5)
    assert fitting == 2
    assert refusal is not None
    assert admit(FREE, POINT, SPEC, 64) == (64, None)


def test_what_the_node_cannot_do_is_unsupported_not_a_lack_of_room() -> None:
    vm = SPEC.model_copy(update={"backend": Backend.MICROVM})
    assert isinstance(refuse(FREE, POINT, vm), Unsupported)


def test_a_share_of_a_host_takes_that_share_of_sandboxes() -> None:
    assert POINT.shared(0.5).max_sandboxes == 1600
    assert POINT.shared(0.5).memory_reserve_mib == POINT.memory_reserve_mib


@pytest.mark.parametrize(
    "asked", [{"cpus": 0}, {"memory_mib": 1}, {"pids": 0}, {"disk_mib": 1 << 40}, {"shm_mib": -1}]
)
def test_impossible_limits_are_refused_for_good(asked: dict[str, float]) -> None:
    spec = SPEC.model_copy(update={"resources": Resources(**asked)})  # type: ignore[arg-type]
    refusal = refuse(FREE, POINT, spec)
    assert isinstance(refusal, InvalidArgument)
    assert next(iter(asked)) in refusal.message


def test_a_phase_that_was_not_given_is_refused() -> None:
    assert isinstance(
        refuse(FREE, POINT, SPEC.model_copy(update={"phase": "score"})), InvalidArgument
    )
