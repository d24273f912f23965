"""Leadership: who holds it, in a KV bucket."""

from __future__ import annotations

from .model import Message


class LeaseRecord(Message):
    """Renewed by writing it again: its revision moves, and that is what others watch."""

    holder: str  # "": given up
    beat: int = 0
