"""kill -9 of the process that holds a node, at any moment: what lives can be taken over, what is
left can be removed, and then nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libhost.enter import remove_node_namespace
from libhost.paths import NodePaths

ROOT = Path(__file__).parents[2]


class Edges:
    """Processes in the same node's namespace, one after the other."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.paths = NodePaths(name, directory / "state", directory / "run")

    def begin(self, role: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tests.kernel.libhost_actor", role, self.name]
        argv.append(str(self.directory))
        return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def succeed(self) -> dict[str, object]:
        with self.begin("successor") as successor:
            out, _ = successor.communicate(timeout=50)
        report: dict[str, object] = json.loads(out)
        return report


@pytest.fixture
def edges(node_name: str, tmp_path: Path) -> Iterator[Edges]:
    edges = Edges(node_name, tmp_path)
    yield edges
    remove_node_namespace(edges.paths)


def kill(process: subprocess.Popen[str]) -> None:
    with process:
        process.send_signal(signal.SIGKILL)


def test_successor_takes_over_what_lives_and_leaves_nothing(edges: Edges) -> None:
    founder = edges.begin("founder")
    assert founder.stdout is not None
    ids = json.loads(founder.stdout.readline())
    kill(founder)

    report = edges.succeed()
    seen = {entry["id"]: entry for entry in report["seen"].values()}
    assert set(seen) == set(ids)
    for entry in seen.values():
        assert 0 < entry["before"] < entry["after"]
    linked, plain = (seen[sandbox_id] for sandbox_id in ids)
    assert linked["address"] in linked["inside"]
    assert plain["address"] is None
    assert {"cgroup", "state directory", "run directory", "interface"} <= set(linked["found_in"])
    assert (report["layers"], report["left"], report["errors"]) == (1, [], [])


@pytest.mark.parametrize("after_ms", [3, 8, 15, 25, 40, 60, 90, 140])
def test_nothing_is_left_of_a_storm(edges: Edges, after_ms: int) -> None:
    process = edges.begin("storm")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(after_ms / 1000)
    kill(process)
    report = edges.succeed()
    assert (report["left"], report["errors"]) == ([], [])


def test_namespace_is_joined_again_and_goes_when_dropped(edges: Edges) -> None:
    founder = edges.begin("founder")
    assert founder.stdout is not None
    founder.stdout.readline()
    inside = os.readlink(f"/proc/{founder.pid}/ns/mnt")
    assert inside != os.readlink("/proc/self/ns/mnt")
    kill(founder)
    successor = edges.begin("storm")
    assert successor.stdout is not None
    successor.stdout.readline()
    assert os.readlink(f"/proc/{successor.pid}/ns/mnt") == inside
    assert str(edges.paths.live_dir) not in Path("/proc/self/mountinfo").read_text()
    kill(successor)
    edges.succeed()
    remove_node_namespace(edges.paths)
    assert str(edges.directory) not in Path("/proc/self/mountinfo").read_text()
