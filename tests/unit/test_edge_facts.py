"""Small deciders: faults, deaths, freshness, load, the lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from libdsec.errors import Conflict, DeathReason
from libdsec.wire.node import Heartbeat, Load
from libhost.pidfd import ExitStatus
from services.edge.admission import NodeFacts, OperatingPoint
from services.edge.death import Evidence, judge
from services.edge.fault import FaultSyntaxError, Point, faults
from services.edge.heartbeat import MAX_BYTES, load_now, smoothed
from services.edge.lock import only_edge
from services.edge.peers import SILENT_AFTER_S, Freshness

KILLED, UNKNOWN = ExitStatus(None, 9), ExitStatus(None, None)


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (Evidence(DeathReason.STOPPED, KILLED, 5, 0), DeathReason.STOPPED),
        (Evidence(DeathReason.EXPIRED, KILLED, 0, 0), DeathReason.EXPIRED),
        (Evidence(None, KILLED, 1, 0), DeathReason.OOM),
        (Evidence(None, KILLED, 1, 1), DeathReason.KILLED),  # that kill was a command's
        (Evidence(None, KILLED, 0, 0), DeathReason.KILLED),
        (Evidence(None, ExitStatus(None, 11), 0, 0), DeathReason.AGENT),
        (Evidence(None, ExitStatus(3, None), 0, 0), DeathReason.AGENT),
        (Evidence(None, UNKNOWN, 2, 0), DeathReason.OOM),
        (Evidence(None, UNKNOWN, 0, 0), DeathReason.KILLED),
        (Evidence(DeathReason.STOPPED, UNKNOWN, 0, 0, same_boot=False), DeathReason.NODE_PANIC),
    ],
)
def test_a_death_is_judged_by_what_was_decided_and_what_the_kernel_saw(
    evidence: Evidence, reason: DeathReason
) -> None:
    assert judge(evidence)[0] is reason


def test_a_peer_is_ready_only_while_it_is_heard() -> None:
    now = 0.0
    peer = Freshness("the policy service", lambda: now)
    assert not peer.ready
    assert "not been heard" in peer.reason
    peer.heard(True, "")
    assert peer.ready
    now = SILENT_AFTER_S + 0.1
    assert not peer.ready
    assert "silent" in peer.reason
    peer.heard(False, "no BPF")
    assert not peer.ready
    assert peer.reason == "no BPF"


@pytest.mark.parametrize("text", ["nowhere:kill", "before_reply", "before_reply:jump", "x:kill:y"])
def test_a_fault_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(FaultSyntaxError):
        faults(text)


def test_a_fault_kills_at_its_point_the_nth_time() -> None:
    script = (
        "from services.edge.fault import Point, faults\n"
        "hit = faults('during_stop:kill:3')\n"
        "for n in range(5):\n"
        "    hit(Point.BEFORE_REPLY)\n"
        "    print(n, flush=True)\n"
        "    hit(Point.DURING_STOP)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert ended.returncode == -9
    assert ended.stdout.split() == [b"0", b"1", b"2"]


def test_without_a_setting_no_point_does_anything() -> None:
    for point in Point:
        faults("")(point)


FACTS = NodeFacts(
    available_memory_mib=5_000, memory_pressure=0, free_disk_mib=1, free_pids=1, cores=4,
    sandboxes=16, creating=64, creating_memory_mib=0, committed_ls_cpus=2, policy_ready=True,
)  # fmt: skip


def test_load_is_each_terms_share_of_the_operating_point() -> None:
    point = OperatingPoint(memory_reserve_mib=0, max_creating=128, max_sandboxes=32)
    load = load_now(FACTS, point, total_memory_mib=10_000)
    assert load == Load(memory=0.5, ls_cpu=0.5, creating=0.5, sandboxes=0.5)
    assert load.value == 0.5


def test_a_burst_of_creates_shows_at_once_and_one_slow_second_does_not() -> None:
    calm, busy = Load(), Load(memory=1.0, creating=1.0)
    after = smoothed(calm, busy)
    assert after.creating == 1.0
    assert after.memory < 0.5
    assert smoothed(after, calm).creating > 0


def test_a_heartbeat_of_the_longest_names_fits() -> None:
    beat = Heartbeat(
        node="n" * 24, incarnation="aaaaaa", session="f" * 12, seq=2**40,
        backends=("container",),
        capabilities=("disk=quota", "publish", "egress", "core_scheduling", "protected_paths"),
        pool="p" * 64, running=99999, paused=99999, creating=9999, max_sandboxes=99999,
        max_creating=9999, memory_mib=10**8, cpus=1024.0, disk_mib=10**9, free_memory_mib=10**8,
        free_disk_mib=10**9, load=Load(memory=0.1234, ls_cpu=0.1234, creating=0.1, sandboxes=0.1),
    )  # fmt: skip
    assert len(beat.encode()) <= MAX_BYTES


def test_the_second_edge_is_told_who_the_first_is(tmp_path: Path) -> None:
    lock = tmp_path / "run" / "edge.lock"
    with only_edge(lock, "n1"):
        with (
            pytest.raises(Conflict, match=f"process {os.getpid()}") as caught,
            only_edge(lock, "n1"),
        ):
            pass
        assert "n1" in caught.value.message
        assert caught.value.hint
    with only_edge(lock, "n1"):
        pass  # the first is gone, and with it its hold
