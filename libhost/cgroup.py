"""A sandbox's cgroups, alike on a unified hierarchy and on a hybrid one.

On a hybrid host memory, cpu and pids are v1 hierarchies and the v2 tree has no controllers but
still freezes, kills and reports; on a unified host all of it is one directory. Names::

    dsec-<node>/{ls,be}/<id>          limits, freeze, kill, statistics      (every hierarchy)
    dsec-<node>/{ls,be}/<id>/box      where PID 1 starts; no limits in it   (v2 only)
    dsec-<node>/{ls,be}/<id>/box/*    one leaf per command, made by the agent

Never touches a cgroup whose top is not ``dsec-``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from libhost.paths import NodePaths


class SchedClass(StrEnum):
    """Latency-sensitive, or best-effort: runs only when nothing latency-sensitive wants to."""

    LS = "ls"
    BE = "be"


@dataclass(frozen=True)
class CgroupLimits:
    """``cpus`` None: no quota, only the weight. ``swap_max_mib`` None: as the host has."""

    memory_mib: int
    pids: int
    cpus: float | None = None
    cpu_weight: int = 100
    swap_max_mib: int | None = 0


@dataclass(frozen=True)
class CgroupStats:
    memory_current_bytes: int
    memory_peak_bytes: int
    memory_anon_bytes: int
    memory_file_bytes: int
    swap_current_bytes: int
    cpu_usage_us: int
    pids_current: int
    oom_kills: int
    pids_refused: int


@dataclass(frozen=True)
class CgroupLayout:
    """Which directory serves which controller on this host; ``unified`` is always the v2 tree."""

    unified: Path
    memory: Path
    cpu: Path
    pids: Path

    @property
    def hybrid(self) -> bool:
        return self.memory != self.unified

    @classmethod
    def detect(cls, mountinfo: str) -> Self:
        """From the text of ``/proc/self/mountinfo``; raises UnsupportedError naming the lack."""
        raise NotImplementedError


class SandboxCgroup:
    """create/open -> join (launcher) -> freeze, thaw, stats -> kill -> wait_empty -> remove."""

    sandbox_id: str
    sched_class: SchedClass

    @property
    def join_files(self) -> tuple[Path, ...]:
        """The ``cgroup.procs`` files a process writes ``0`` to, limits first, box last."""
        raise NotImplementedError

    @property
    def v2_path(self) -> Path:
        """The v2 directory: what BPF programs attach to and whose inode is the cgroup id."""
        raise NotImplementedError

    def open_box(self) -> int:
        """Descriptor of ``box`` for the agent: a mount of its own, so that ``..`` ends there."""
        raise NotImplementedError

    def set_limits(self, limits: CgroupLimits) -> None:
        raise NotImplementedError

    def freeze(self, *, timeout_s: float) -> None:
        """Freeze and wait until the kernel says so; TimeoutError leaves it freezing."""
        raise NotImplementedError

    def thaw(self) -> None:
        raise NotImplementedError

    def is_frozen(self) -> bool:
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL to every process in it, frozen or not; returns at once."""
        raise NotImplementedError

    def is_populated(self) -> bool:
        raise NotImplementedError

    def open_events(self) -> int:
        """Descriptor of ``cgroup.events``: POLLPRI on it means populated or frozen changed."""
        raise NotImplementedError

    def wait_empty(self, *, timeout_s: float) -> None:
        """Raises TimeoutError with the pids that are left."""
        raise NotImplementedError

    def process_ids(self) -> list[int]:
        """Every process in it and below."""
        raise NotImplementedError

    def stats(self) -> CgroupStats:
        raise NotImplementedError

    def remove(self) -> None:
        """Remove an empty cgroup from every hierarchy; idempotent."""
        raise NotImplementedError


class NodeCgroups:
    """The node's subtree in every hierarchy."""

    def __init__(self, layout: CgroupLayout, paths: NodePaths) -> None:
        raise NotImplementedError

    def ensure(self) -> None:
        """Create the node's parents (``cpu.idle`` on ``be``); idempotent."""
        raise NotImplementedError

    @property
    def v2_path(self) -> Path:
        """Parent of all sandboxes' v2 cgroups: where node-wide BPF programs are attached."""
        raise NotImplementedError

    def create(self, sandbox_id: str, sched: SchedClass, limits: CgroupLimits) -> SandboxCgroup:
        raise NotImplementedError

    def open(self, sandbox_id: str) -> SandboxCgroup:
        """Raises FileNotFoundError if no hierarchy has it."""
        raise NotImplementedError

    def list_ids(self) -> Sequence[str]:
        """Ids found in any hierarchy, also half-made ones."""
        raise NotImplementedError

    def remove(self) -> None:
        """Remove the node's own parents; fails with OSError EBUSY while a sandbox is left."""
        raise NotImplementedError
