"""Everything on the host that carries a node's name, and taking one sandbox's share of it away.

Stopping a sandbox and sweeping up after a crash are the same function: each step does nothing
where nothing is left, and one that fails does not keep the next from running.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from libhost import loop
from libhost.cgroup import NodeCgroups
from libhost.crun import Runtime
from libhost.disk import Disk
from libhost.net import NodeNetwork
from libhost.paths import SLOT_PATTERN, NodePaths, slot_of


@dataclass(frozen=True)
class Host:
    """The parts of one node that hold something of a sandbox."""

    paths: NodePaths
    cgroups: NodeCgroups
    disk: Disk
    network: NodeNetwork | None
    runtime: Runtime


@dataclass(frozen=True)
class Remains:
    """Where something of a sandbox was found. ``sandbox_id`` None: only its slot is known."""

    slot: str
    sandbox_id: str | None
    found_in: frozenset[str]


def find_remains(host: Host) -> dict[str, Remains]:
    """By slot; includes running sandboxes. The caller knows which of them it keeps."""
    places: defaultdict[str, set[str]] = defaultdict(set)
    ids: dict[str, str] = {}
    for place, sandbox_id in _named(host):
        ids[slot_of(sandbox_id)] = sandbox_id
        places[slot_of(sandbox_id)].add(place)
    for slot in _names(host.paths.live_dir):
        if SLOT_PATTERN.fullmatch(slot):
            places[slot].add("run directory")
            with contextlib.suppress(FileNotFoundError):
                ids.setdefault(slot, (host.paths.live_dir / slot / "id").read_text())
    if host.network is not None:
        for slot in host.network.interfaces():
            places[slot].add("interface")
    return {
        slot: Remains(slot, ids.get(slot) or None, frozenset(found))
        for slot, found in places.items()
    }


def _named(host: Host) -> Iterator[tuple[str, str]]:
    """(place, id) of everything that is named by the id itself."""
    yield from (("cgroup", name) for name in host.cgroups.list_ids())
    yield from (("state directory", name) for name in _names(host.paths.sandboxes_dir))
    yield from (("runtime state", name) for name in _names(host.paths.crun_root))
    for _, image in loop.attached():
        if image.parent.parent == host.paths.sandboxes_dir:
            yield "loop device", image.parent.name


def _names(directory: Path) -> list[str]:
    """Hidden entries are not sandboxes: crun keeps a cache of its own in one."""
    with contextlib.suppress(FileNotFoundError):
        return [entry.name for entry in directory.iterdir() if not entry.name.startswith(".")]
    return []


def remove_sandbox(host: Host, remains: Remains, *, timeout_s: float) -> list[Exception]:
    """Kill, wait, and remove in the reverse order of creation; returns what went wrong."""
    errors: list[Exception] = []

    def attempt(step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as err:
            errors.append(err)

    if remains.sandbox_id is None:
        # Killed between making the run directory and naming it: nothing else can exist yet.
        attempt(lambda: _remove_tree(host.paths.live_dir / remains.slot))
        return errors
    sandbox = host.paths.sandbox(remains.sandbox_id)
    attempt(lambda: _end_processes(host, sandbox.sandbox_id, timeout_s))
    attempt(lambda: host.runtime.delete(sandbox))
    if host.network is not None:
        network = host.network
        attempt(lambda: network.remove(sandbox))
    attempt(lambda: _remove_cgroup(host, sandbox.sandbox_id))
    attempt(lambda: _remove_tree(sandbox.run_dir))
    attempt(lambda: host.disk.discard(sandbox))
    return errors


def _end_processes(host: Host, sandbox_id: str, timeout_s: float) -> None:
    with contextlib.suppress(FileNotFoundError):
        cgroup = host.cgroups.open(sandbox_id)
        cgroup.kill()
        cgroup.wait_empty(timeout_s=timeout_s)


def _remove_cgroup(host: Host, sandbox_id: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        host.cgroups.open(sandbox_id).remove()


def _remove_tree(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)
