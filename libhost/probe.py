"""What this host can do, found by trying.

A list of files or a kernel version says what could be; only an attempt says what is. Every finding
carries its reason, so that a refusal, a skipped test and ``dsec doctor`` give the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from libhost.cgroup import CgroupLayout
from libhost.disk import DiskMode
from libhost.overlay import OverlayMode


@dataclass(frozen=True)
class Finding:
    ok: bool
    reason: str


@dataclass(frozen=True)
class HostCapabilities:
    """One probe's result. ``cgroups``, ``overlay`` or ``disk`` None: no sandbox can run here."""

    root: Finding
    crun: Finding
    cgroups: CgroupLayout | None
    cgroups_reason: str
    erofs_file: Finding
    overlay: OverlayMode | None
    overlay_reason: str
    disk: DiskMode | None
    disk_reason: str
    memory_reclaim: Finding
    process_madvise: Finding
    swap: Finding
    cgroup_kill: Finding
    cgroup_bpf: Finding
    core_scheduling: Finding
    pressure: Finding
    pidfd_exit: Finding

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this host cannot run a container; empty if it can."""
        raise NotImplementedError


def probe_host(state_dir: Path) -> HostCapabilities:
    """Try everything once per process and state directory; leaves nothing behind."""
    raise NotImplementedError
