"""What a host holds of a stack's sandboxes, read from the kernel and the disk, not from DSec."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from libhost import loop
from libhost.bpf import libbpf
from libhost.bpf.layout import SANDBOX_ID_SIZE, Sandbox, unpack_sandbox_id
from libhost.bpf.map import Map
from libhost.bpf.pins import pin_directory
from libhost.paths import NodePaths, slot_of
from tests.stack import Stack

_CGROUP = re.compile(r"/dsec-(?P<node>[^/\n]+)/(?:ls|be)/(?P<id>[^/\n]+)")
_LAYER = re.compile(r"/live/layers/(?P<digest>[0-9a-f]+)$")

_MAY_LACK = {"interface"}  # only those with a network have one
_MAY_OUTLIVE = {"policy"}  # until the next sweep, where the policy service died as it was removed


@dataclass(frozen=True)
class NodeCensus:
    """Place → ids of the sandboxes that something was found of there."""

    node: str
    places: dict[str, frozenset[str]]

    def differences(self, alive: Collection[str]) -> Iterator[str]:
        """Where the host does not hold exactly what is said to be alive."""
        expected = frozenset(alive)
        slots = {slot_of(sandbox_id): sandbox_id for sandbox_id in expected}
        for place, found in self.places.items():
            known = frozenset(slots.get(name, name) for name in found)
            if place not in _MAY_OUTLIVE:
                yield from (f"{self.node}: {place} of {i} is left over" for i in known - expected)
            if place not in _MAY_LACK:
                yield from (f"{self.node}: {i} has no {place}" for i in expected - known)


def take(stack: Stack, node: str, edge_pid: int) -> NodeCensus:
    """Look everywhere a sandbox leaves something; `edge_pid` opens the node's own namespace."""
    run = stack.paths.node_run(node)
    live = Path(f"/proc/{edge_pid}/root{run}/live")
    state = stack.paths.node_state(node) / "sandboxes"
    places = {
        "process": frozenset(_processes(node)),
        "run directory": frozenset(
            p.name for p in live.iterdir() if re.fullmatch(r"[a-z2-7]{10}", p.name)
        ),
        "runtime state": frozenset(_names(live / "crun")),
        "state directory": frozenset(_names(state)),
        "loop device": frozenset(
            image.parent.name for _, image in loop.attached() if image.parent.parent == state
        ),
        "interface": frozenset(_interfaces(node)),
        "policy": frozenset(_policies(NodePaths(node, state.parent, run))),
    }
    for hierarchy, ids in _cgroups(node):
        places[f"cgroup ({hierarchy})"] = ids
    if not places["loop device"]:  # a host with project quotas needs none
        del places["loop device"]
    return NodeCensus(node, places)


def layer_mounts(edge_pid: int) -> Counter[str]:
    """Digest → how often it is mounted in the node's namespace."""
    lines = Path(f"/proc/{edge_pid}/mountinfo").read_text().splitlines()
    found = (_LAYER.search(line.split()[4]) for line in lines)
    return Counter(match["digest"] for match in found if match)


def main_processes(node: str) -> dict[str, int]:
    """Sandbox id → the host's pid of its PID 1."""
    return {match["id"]: pid for pid, match in _members(node) if _innermost_pid(pid) == 1}


def _innermost_pid(pid: int) -> int:
    """As the process itself sees it; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    [line] = [line for line in status.splitlines() if line.startswith("NSpid:")]
    return int(line.split()[-1])


def _members(node: str) -> Iterator[tuple[int, re.Match[str]]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            match = _CGROUP.search((entry / "cgroup").read_text())
        except OSError:  # it ended while we looked
            continue
        if match is not None and match["node"] == node:
            yield int(entry.name), match


def _processes(node: str) -> Iterator[str]:
    yield from (match["id"] for _, match in _members(node))


def _cgroups(node: str) -> Iterator[tuple[str, frozenset[str]]]:
    root = Path("/sys/fs/cgroup")
    for hierarchy in (root, *root.iterdir()):
        top = hierarchy / f"dsec-{node}"
        if top.is_dir():
            ids = [*(top / "ls").glob("*_*_*"), *(top / "be").glob("*_*_*")]
            yield hierarchy.name, frozenset(path.name for path in ids if path.is_dir())


def _interfaces(node: str) -> Iterator[str]:
    for entry in Path("/sys/class/net").iterdir():
        try:
            ours = (entry / "ifalias").read_text().strip() == f"dsec-{node}"
        except OSError:  # it went while we looked
            continue
        if ours and re.fullmatch(r"ds[a-z2-7]{10}", entry.name):
            yield entry.name[2:]


def _policies(paths: NodePaths) -> Iterator[str]:
    """Ids in the kernel's own map."""
    fd = libbpf.obj_get(str(pin_directory(paths) / "sandboxes"))
    try:
        for key, _ in Map("sandboxes", fd, SANDBOX_ID_SIZE, len(Sandbox(0, 0).pack())).items():
            yield unpack_sandbox_id(key)
    finally:
        os.close(fd)


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if not path.name.startswith(".")]
