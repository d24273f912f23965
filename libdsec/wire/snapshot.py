"""Between an edge and the snapshotter of its node.

A request may be repeated, and answered by any of several workers: both verbs say what is to be, not
what to change. Without a snapshotter the edge freezes and thaws by itself; only the memory stays.
"""

from __future__ import annotations

from .model import Message


class FreezeRequest(Message):
    sandbox_id: str
    lane: str  # be | ls
    reclaim: bool = True
    deadline_s: float = 10.0  # for freezing and reclaiming together


class Frozen(Message):
    """The sandbox stands still. All bytes are differences of its cgroup's own counters."""

    frozen_ms: float
    reclaim_ms: float = 0.0
    reclaimed_bytes: int = 0  # what it no longer holds in memory: anonymous and file pages
    anon_bytes: int = 0  # of these, anonymous
    file_bytes: int = 0  # of these, file pages
    swapped_bytes: int = 0  # what went to swap for it; on zram it takes memory there, compressed
    resident_bytes: int = 0  # what it still holds
    partial: bool = False  # the deadline, or the kernel, ended it before all was gone
    how: str = ""  # memory_reclaim | pageout | file_only | none: <why>


class ThawRequest(Message):
    sandbox_id: str
    lane: str
    prefetch: bool = True


class Thawed(Message):
    prefetch_ms: float = 0.0
    prefetched_bytes: int = 0
    thaw_ms: float = 0.0


class SnapshotterHealth(Message):
    ready: bool
    reason: str = ""


def queue_group(node: str) -> str:
    """Shared by a node's snapshotters: each request goes to one of them."""
    return f"snapshotter.{node}"
