"""Everything on the host that carries a node's name, and taking one sandbox's share of it away.

Stopping a sandbox and sweeping up after a crash are the same function: each step does nothing
where nothing is left, and one that fails does not keep the next from running.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from libhost.cgroup import NodeCgroups
from libhost.crun import Runtime
from libhost.disk import Disk
from libhost.net import NodeNetwork
from libhost.paths import NodePaths


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
    raise NotImplementedError


def remove_sandbox(
    host: Host, remains: Remains, *, timeout_s: float, before_disk: Callable[[], None] | None = None
) -> list[Exception]:
    """Kill, wait, and remove in the reverse order of creation; returns what went wrong."""
    raise NotImplementedError
