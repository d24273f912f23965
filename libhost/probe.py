"""What this host can do, found by trying.

A list of files or a kernel version says what could be; only an attempt says what is. Every finding
carries its reason, so that a refusal, a skipped test and ``dsec doctor`` give the same one.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from libhost import attempt, seccomp
from libhost.cgroup import CgroupLayout
from libhost.errors import HostError, UnsupportedError
from libhost.overlay import OverlayMode
from libhost.writable import DiskMode


@dataclass(frozen=True)
class Finding:
    ok: bool
    reason: str


@dataclass(frozen=True)
class HostCapabilities:
    """One probe's result. ``cgroups``, ``overlay`` or ``disk`` None: no sandbox can run here."""

    root: Finding
    crun: Finding
    seccomp: Finding
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
    quick_joins: Finding
    core_scheduling: Finding
    pressure: Finding
    pidfd_exit: Finding

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this host cannot run a container; empty if it can."""
        needed = {
            "root": self.root,
            "crun": self.crun,
            "seccomp": self.seccomp,
            "cgroups": Finding(self.cgroups is not None, self.cgroups_reason),
            "cgroup.kill": self.cgroup_kill,
            "EROFS from a file": self.erofs_file,
            "overlay": Finding(self.overlay is not None, self.overlay_reason),
            "limited disk": Finding(self.disk is not None, self.disk_reason),
        }
        return tuple(f"{name}: {found.reason}" for name, found in needed.items() if not found.ok)


@lru_cache(maxsize=8)
def probe_host(state_dir: Path) -> HostCapabilities:
    """Try everything once per process and state directory; leaves nothing behind."""
    if os.geteuid() != 0:
        return _unprivileged()
    state_dir.mkdir(parents=True, exist_ok=True)
    scratch = state_dir / f".probe-{secrets.token_hex(4)}"
    scratch.mkdir(mode=0o700)
    try:
        return _probe(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _probe(scratch: Path) -> HostCapabilities:
    layout, layout_reason = _layout()
    image = scratch / "layer.erofs"
    erofs = _try(lambda: attempt.mount_erofs(scratch, image))
    disks = {
        DiskMode.QUOTA: _try(lambda: attempt.limit_project(scratch)),
        DiskMode.LOOP: _try(lambda: attempt.mount_loop(scratch)),
    }
    overlays = {mode: _try(partial(attempt.stack, scratch, image, mode)) for mode in OverlayMode}
    return HostCapabilities(
        root=Finding(True, "uid 0"),
        crun=_try(attempt.run_crun),
        seccomp=_try(lambda: f"{len(seccomp.compile_filter()) // 8} instructions"),
        cgroups=layout,
        cgroups_reason=layout_reason,
        erofs_file=erofs,
        overlay=next((mode for mode, found in overlays.items() if found.ok), None),
        overlay_reason=_reasons(overlays),
        disk=next((mode for mode, found in disks.items() if found.ok), None),
        disk_reason=_reasons(disks),
        memory_reclaim=_try(lambda: attempt.reclaim_cgroup(layout)),
        process_madvise=_try(attempt.advise_own_heap),
        swap=_try(attempt.find_swap),
        cgroup_kill=_try(lambda: attempt.kill_cgroup(layout)),
        quick_joins=_try(attempt.favor_joins),
        core_scheduling=_try(attempt.take_cookie),
        pressure=_try(attempt.read_pressure),
        pidfd_exit=_try(attempt.read_exit_by_pidfd),
    )


def _layout() -> tuple[CgroupLayout | None, str]:
    try:
        layout = CgroupLayout.detect(Path("/proc/self/mountinfo").read_text())
        layout.check_delegation()
    except UnsupportedError as err:
        return None, err.reason
    return layout, "hybrid" if layout.hybrid else "unified"


def _try(experiment: Callable[[], str]) -> Finding:
    """An experiment returns what it saw; raising is its way of saying no."""
    try:
        return Finding(True, experiment())
    except UnsupportedError as err:
        return Finding(False, err.reason)
    except (OSError, HostError) as err:
        return Finding(False, str(err))


def _reasons(findings: Mapping[OverlayMode, Finding] | Mapping[DiskMode, Finding]) -> str:
    return "; ".join(f"{mode}: {found.reason}" for mode, found in findings.items())


def _unprivileged() -> HostCapabilities:
    no = Finding(False, "not tried: needs root")
    return HostCapabilities(
        root=Finding(False, f"running as uid {os.geteuid()}"),
        crun=no,
        seccomp=no,
        cgroups=None,
        cgroups_reason=no.reason,
        erofs_file=no,
        overlay=None,
        overlay_reason=no.reason,
        disk=None,
        disk_reason=no.reason,
        memory_reclaim=no,
        process_madvise=no,
        swap=no,
        cgroup_kill=no,
        quick_joins=no,
        core_scheduling=no,
        pressure=no,
        pidfd_exit=no,
    )
