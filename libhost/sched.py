"""Keeping best-effort work off a latency-sensitive task's core (core scheduling)."""

from __future__ import annotations

from collections.abc import Sequence


def new_cookie(process_ids: Sequence[int]) -> None:
    """Give these processes one fresh core-scheduling cookie; UnsupportedError where absent."""
    raise NotImplementedError


def share_cookie(leader_pid: int, process_ids: Sequence[int]) -> None:
    """Give these processes the cookie of ``leader_pid``."""
    raise NotImplementedError
