"""Live, suspect, lost: by sequence numbers and one's own clock, and not when many fall silent."""

from __future__ import annotations

from libdsec.wire.node import Heartbeat, NodeState
from services.scheduler.nodes import FORGET_S, NodeTable


class Cluster:
    """Nodes that beat every second unless silent, and a table that reads them every half."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.table = NodeTable(lambda: self.now)
        self.beats = {f"n{i}": beat(f"n{i}", 1) for i in range(count)}
        self.silent: set[str] = set()
        self.run(2.0)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            if self.now == int(self.now):
                for name, last in self.beats.items():
                    if name not in self.silent:
                        self.beats[name] = last.model_copy(update={"seq": last.seq + 1})
            self.table.observe(self.beats.values())

    def states(self) -> dict[str, NodeState]:
        return {v.heartbeat.node: v.state for v in self.table.views()}


def beat(node: str, seq: int, session: str = "s") -> Heartbeat:
    return Heartbeat(node=node, incarnation="aaaaaa", session=session, seq=seq)


def test_a_node_is_live_once_its_number_moves() -> None:
    table = NodeTable(lambda: 0.0)
    table.observe([beat("ghost", 7)])
    assert table.views()[0].state is NodeState.SUSPECT
    table.observe([beat("ghost", 8)])
    assert table.views()[0].state is NodeState.LIVE


def test_silence_makes_suspect_after_3_s_and_lost_after_10_s() -> None:
    cluster = Cluster(5)
    cluster.silent = {"n0"}
    cluster.run(2.5)
    assert cluster.states()["n0"] is NodeState.LIVE
    cluster.run(1.0)
    assert cluster.states()["n0"] is NodeState.SUSPECT
    cluster.run(6.0)
    assert cluster.states()["n0"] is NodeState.SUSPECT
    cluster.run(1.0)
    assert cluster.states()["n0"] is NodeState.LOST
    cluster.silent = set()
    cluster.run(1.0)
    assert set(cluster.states().values()) == {NodeState.LIVE}


def test_a_late_heartbeat_of_the_same_session_makes_nobody_younger() -> None:
    cluster = Cluster(2)
    cluster.silent = {"n0"}
    cluster.run(2.0)
    last = cluster.beats["n0"]
    cluster.beats["n0"] = last.model_copy(update={"seq": last.seq - 1})
    cluster.run(2.0)
    assert cluster.states()["n0"] is NodeState.SUSPECT


def test_a_new_session_counts_from_one_again() -> None:
    cluster = Cluster(2)
    cluster.beats["n0"] = beat("n0", 1, session="s2")
    cluster.run(0.5)
    views = {v.heartbeat.node: v for v in cluster.table.views()}
    assert views["n0"].heartbeat.session == "s2"


def test_an_outage_of_the_view_makes_nobody_older() -> None:
    cluster = Cluster(5)
    cluster.now += 60.0  # nothing could be read
    cluster.table.observe(cluster.beats.values())  # what was left in it
    assert set(cluster.states().values()) == {NodeState.LIVE}
    cluster.run(1.0)
    assert set(cluster.states().values()) == {NodeState.LIVE}


def test_many_that_fall_silent_together_are_not_declared_lost() -> None:
    cluster = Cluster(20)
    cluster.silent = {f"n{i}" for i in range(4)}
    cluster.run(30.0)
    assert cluster.table.frozen
    assert NodeState.LOST not in cluster.states().values()
    cluster.silent = {"n0"}
    cluster.run(1.0)
    assert not cluster.table.frozen
    assert cluster.states()["n0"] is NodeState.LOST


def test_a_tenth_of_many_nodes_is_not_many() -> None:
    cluster = Cluster(60)
    cluster.silent = {f"n{i}" for i in range(6)}
    cluster.run(12.0)
    assert not cluster.table.frozen
    assert list(cluster.states().values()).count(NodeState.LOST) == 6


def test_all_nodes_silent_at_once_is_our_own_fault() -> None:
    cluster = Cluster(2)
    cluster.silent = {"n0", "n1"}
    cluster.run(30.0)
    assert cluster.table.frozen
    assert NodeState.LOST not in cluster.states().values()


def test_nodes_lost_one_after_another_are_all_declared() -> None:
    cluster = Cluster(10)
    for number in range(5):
        cluster.silent.add(f"n{number}")
        cluster.run(12.0)
    assert not cluster.table.frozen
    assert list(cluster.states().values()).count(NodeState.LOST) == 5


def test_a_node_lost_for_long_is_forgotten() -> None:
    cluster = Cluster(2)
    cluster.silent = {"n0"}
    cluster.run(12.0)
    assert cluster.table.forget() == []
    cluster.run(FORGET_S)
    assert cluster.table.forget() == ["n0"]
    assert set(cluster.states()) == {"n1"}
