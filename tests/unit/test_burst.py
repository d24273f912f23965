"""When local is too full, and what may then leave."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from libdsec.wire.burst import BurstQuestion
from libdsec.wire.node import Heartbeat, Load
from libdsec.wire.sandbox import Backend, SandboxSpec
from services.burst.eligibility import CloudRules, may_leave
from services.burst.handlers import Burst
from services.burst.metrics import BurstMetrics
from services.burst.settings import BurstSettings
from services.burst.utilisation import Fleet, Hysteresis

QUESTION = BurstQuestion(project="team-a", spec=SandboxSpec(image="b"), digests=("d1", "d2"))
EVERYTHING = CloudRules(synced={"d1", "d2"})


def beat(node: str, load: float, *, seq: int = 1, pool: str = "local", **more: bool) -> Heartbeat:
    return Heartbeat(
        node=node,
        incarnation="aaaaaa",
        session="s",
        seq=seq,
        pool=pool,
        load=Load(memory=load),
        **more,
    )


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def service(clock: Clock, *, enabled: bool = True, rules: CloudRules = EVERYTHING) -> Burst:
    return Burst(
        rules=rules, switch=Hysteresis(0.8, 0.7), enabled=enabled, pool="cloud", now_s=clock,
        metrics=BurstMetrics(CollectorRegistry()),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("question", "rules", "says"),
    [
        (QUESTION, CloudRules(synced={"d1"}), "1 of 2 layers"),
        (QUESTION, CloudRules(synced={"d1", "d2"}, projects={"team-b"}), "team-a"),
        (
            QUESTION.model_copy(update={"spec": SandboxSpec(image="b", backend=Backend.MICROVM)}),
            EVERYTHING,
            "microvm",
        ),
        (BurstQuestion(project="team-a", spec=SandboxSpec(image="b")), EVERYTHING, "layers"),
    ],
)
def test_request_stays_and_the_rule_is_named(
    question: BurstQuestion, rules: CloudRules, says: str
) -> None:
    ruling = may_leave(question, rules)
    assert not ruling.eligible
    assert says in ruling.reason


def test_request_with_every_layer_synced_may_leave() -> None:
    assert may_leave(QUESTION, EVERYTHING).eligible


def test_switch_does_not_flutter_between_its_bounds() -> None:
    switch = Hysteresis(0.8, 0.7)
    seen = [switch.feed(v) for v in (0.79, 0.8, 0.75, 0.71, 0.7, 0.75, 0.79, 0.81)]
    assert seen == [False, True, True, True, False, False, False, True]


def test_utilisation_is_the_mean_of_healthy_local_nodes() -> None:
    fleet = Fleet()
    fleet.hear(beat("a", 0.9), 100)
    fleet.hear(beat("b", 0.5), 100)
    fleet.hear(beat("c", 0.1, pool="cloud"), 100)
    fleet.hear(beat("d", 0.1, cordoned=True), 100)
    fleet.hear(beat("e", 0.1), 90)  # silent for ten seconds
    assert fleet.utilisation(100) == pytest.approx(0.7)


def test_replayed_heartbeat_does_not_keep_a_node_alive() -> None:
    fleet = Fleet()
    fleet.hear(beat("a", 0.9, seq=5), 100)
    fleet.hear(beat("a", 0.1, seq=5), 110)
    fleet.hear(beat("a", 0.1, seq=4), 110)
    assert fleet.utilisation(110) == 0.0


async def test_answer_names_the_cloud_only_when_full_and_the_pool_is_there() -> None:
    clock = Clock()
    burst = service(clock)
    await burst.on_heartbeat(beat("a", 0.9), None)  # type: ignore[arg-type]
    alone = await burst.ask(QUESTION, None)  # type: ignore[arg-type]
    assert alone.pools == ("local",)
    assert alone.bursting
    assert "cloud" in alone.reason
    await burst.on_heartbeat(beat("c", 0.0, pool="cloud"), None)  # type: ignore[arg-type]
    assert (await burst.ask(QUESTION, None)).pools == ("local", "cloud")  # type: ignore[arg-type]
    await burst.on_heartbeat(beat("a", 0.2, seq=2), None)  # type: ignore[arg-type]
    calm = await burst.ask(QUESTION, None)  # type: ignore[arg-type]
    assert calm.pools == ("local",)
    assert not calm.bursting


async def test_switched_off_means_local() -> None:
    clock = Clock()
    burst = service(clock, enabled=False)
    for each in (beat("a", 1.0), beat("c", 0.0, pool="cloud")):
        await burst.on_heartbeat(each, None)  # type: ignore[arg-type]
    assert (await burst.ask(QUESTION, None)).pools == ("local",)  # type: ignore[arg-type]


def test_settings_refuse_a_stop_above_the_start() -> None:
    with pytest.raises(ValueError, match="burst_stop"):
        BurstSettings(burst_start=0.5, burst_stop=0.6)
