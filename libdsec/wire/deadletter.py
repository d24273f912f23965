"""Messages that nobody could handle: kept, shown, replayed or discarded."""

from __future__ import annotations

from .model import Message


class DeadLetter(Message):
    seq: int = 0
    at: float
    subject: str
    stream: str
    reason: str
    deliveries: int = 1
    headers: dict[str, str] = {}
    payload: bytes = b""


class DeadLetterQuery(Message):
    limit: int = 100


class DeadLetterListing(Message):
    letters: tuple[DeadLetter, ...] = ()
    total: int = 0


class DeadLetterAction(Message):
    seqs: tuple[int, ...]


class DeadLetterOutcome(Message):
    done: tuple[int, ...] = ()
    failed: dict[int, str] = {}


class QueueQuery(Message):
    """Depth and age of the waiting requests."""


class LaneDepth(Message):
    lane: str
    waiting: int
    delivered: int = 0
    oldest_age_s: float = 0.0


class QueueListing(Message):
    lanes: tuple[LaneDepth, ...] = ()
