"""Which nodes a request's numbers rule out for ever."""

from __future__ import annotations

import pytest

from libdsec.wire.node import Heartbeat, NodeState
from libdsec.wire.sandbox import Qos, Resources, SandboxSpec
from services.scheduler.filters import Need, dropped_by

BEAT = Heartbeat(
    node="n1", incarnation="a", session="s", seq=1, backends=("container",), policy_ready=True,
    memory_mib=1024, cpus=2.0, disk_mib=1024,
)  # fmt: skip


@pytest.mark.parametrize(
    ("qos", "resources", "dropped"),
    [
        (Qos.BEST_EFFORT, Resources(cpus=4, memory_mib=1024, disk_mib=1024), None),
        (Qos.LATENCY_SENSITIVE, Resources(cpus=4, memory_mib=64, disk_mib=64), "cpus"),
        (Qos.LATENCY_SENSITIVE, Resources(cpus=2, memory_mib=64, disk_mib=64), None),
        (Qos.BEST_EFFORT, Resources(cpus=1, memory_mib=1025, disk_mib=64), "memory_size"),
        (Qos.BEST_EFFORT, Resources(cpus=1, memory_mib=64, disk_mib=1025), "disk_size"),
    ],
)
def test_a_limit_may_exceed_the_node_but_a_promise_may_not(
    qos: Qos, resources: Resources, dropped: str | None
) -> None:
    spec = SandboxSpec(image="a", qos=qos, resources=resources)
    verdict = dropped_by(BEAT, NodeState.LIVE, Need(spec))
    assert (verdict and verdict[0]) == dropped


def test_needs_that_pass_other_filters_have_other_signatures() -> None:
    spec = SandboxSpec(image="a", resources=Resources(cpus=4))
    promised = spec.model_copy(update={"qos": Qos.LATENCY_SENSITIVE})
    assert Need(spec).signature != Need(promised).signature
