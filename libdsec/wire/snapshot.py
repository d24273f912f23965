"""Between an edge and the snapshotter of its node."""

from __future__ import annotations

from .model import Message


class FreezeRequest(Message):
    sandbox_id: str
    lane: str  # be | ls
    reclaim: bool = True
    deadline_s: float = 10.0


class Frozen(Message):
    frozen_ms: float
    reclaim_ms: float = 0.0
    reclaimed_bytes: int = 0
    resident_bytes: int = 0
    how: str = ""  # memory.reclaim | pageout | none: <why>


class ThawRequest(Message):
    sandbox_id: str
    lane: str
    prefetch: bool = True


class Thawed(Message):
    prefetch_ms: float = 0.0
    thaw_ms: float = 0.0


class SnapshotterHealth(Message):
    ready: bool
    reason: str = ""
