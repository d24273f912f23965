"""What happened to sandboxes: published in batches from an edge's outbox."""

from __future__ import annotations

from .model import Message


class LifecycleRecord(Message):
    """One change of one sandbox's state; the phase timings of a create are always in it."""

    sandbox_id: str
    project: str
    request_id: str
    state: str
    at: float
    reason: str = ""
    phases_ms: dict[str, float] = {}
    trace_id: str = ""


class LifecycleBatch(Message):
    node: str
    session: str
    first: int  # sequence number of the first record: a gap is a loss, and says how many
    records: tuple[LifecycleRecord, ...]
