"""Memory pressure, and taking memory back from a frozen sandbox.

Where the memory controller is v2 the kernel reclaims (``memory.reclaim``); elsewhere the pages of
each process are advised out. Without swap only file pages can go, and the result says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from libhost.cgroup import SandboxCgroup
from libhost.probe import HostCapabilities


@dataclass(frozen=True)
class Pressure:
    """Share of time (0..100) in which some, or all, tasks stood waiting."""

    some_avg10: float
    some_avg60: float
    full_avg10: float
    full_avg60: float
    some_total_us: int


class ReclaimWay(StrEnum):
    MEMORY_RECLAIM = "memory_reclaim"
    PAGEOUT = "pageout"
    FILE_ONLY = "file_only"


@dataclass(frozen=True)
class Reclaimed:
    """Differences of the cgroup's own counters; ``partial`` if a deadline or EAGAIN ended it."""

    way: ReclaimWay
    anon_bytes: int
    file_bytes: int
    swapped_bytes: int
    duration_s: float
    partial: bool


def read_pressure(path: Path) -> Pressure:
    """``/proc/pressure/*`` or a cgroup's ``*.pressure``; OSError EOPNOTSUPP where PSI is off."""
    raise NotImplementedError


def reclaim(cgroup: SandboxCgroup, host: HostCapabilities, *, timeout_s: float) -> Reclaimed:
    """Push out what can go. The cgroup should be frozen, else its tasks fetch it right back."""
    raise NotImplementedError


def prefetch(cgroup: SandboxCgroup, *, timeout_s: float) -> int:
    """Ask for the swapped pages back (WILLNEED) before the thaw; returns the bytes advised."""
    raise NotImplementedError
