"""Which nodes live, judged from their heartbeats' sequence numbers by this process's own clock.

Invariants:

* A node is live only once its sequence number has been seen to move: a record left behind by a
  node that is gone never counts.
* Time during which the view could not be read makes nobody older.
* Many nodes falling silent together is more likely our fault than theirs: then nobody is declared
  lost until enough of them have been heard again (`frozen`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from libdsec.wire.defaults import HEARTBEAT_S, LEASE_S, SUSPECT_AFTER_S
from libdsec.wire.node import Heartbeat, NodeState, NodeView

FORGET_S: Final = 600.0  # a lost node leaves the listing after this long
GAP_S: Final = 2 * HEARTBEAT_S  # between two reads; a longer one is an outage of the view
MASS: Final = 3  # silent nodes
MASS_SHARE: Final = 0.10  # of all nodes; both must be exceeded, or all nodes be silent


@dataclass
class _Seen:
    beat: Heartbeat
    heard_at: float
    moved: bool = False
    lost: bool = False


class NodeTable:
    """`observe` whenever the view has been read, with everything that is in it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._read_at: float | None = None
        self.frozen = False

    def observe(self, beats: Iterable[Heartbeat]) -> None:
        now = self._clock()
        self._excuse(now)
        for beat in beats:
            seen = self._seen.get(beat.node)
            if seen is None:
                self._seen[beat.node] = _Seen(beat, now)
            elif _newer(beat, seen.beat):
                seen.beat, seen.heard_at, seen.moved, seen.lost = beat, now, True, False
        self._declare(now)

    def views(self) -> list[NodeView]:
        """All known nodes, with their age at the last read."""
        return [
            NodeView(heartbeat=s.beat, state=self._state(s), age_s=self._age(s))
            for s in self._seen.values()
        ]

    def forget(self) -> list[str]:
        """Drop the nodes that have been lost for long; gives their names."""
        gone = [n for n, s in self._seen.items() if s.lost and self._age(s) > FORGET_S]
        for name in gone:
            del self._seen[name]
        return gone

    def _excuse(self, now: float) -> None:
        if self._read_at is not None and now - self._read_at > GAP_S:
            outage_s = now - self._read_at - HEARTBEAT_S
            for seen in self._seen.values():
                seen.heard_at += outage_s
        self._read_at = now

    def _declare(self, now: float) -> None:
        silent = [s for s in self._seen.values() if s.moved and self._age(s) >= SUSPECT_AFTER_S]
        fresh = [s for s in silent if not s.lost]  # fell silent in this window
        known = sum(s.moved for s in self._seen.values())
        together = len(fresh)
        self.frozen = (together >= MASS and together > MASS_SHARE * known) or (
            together == known > 1
        )
        if self.frozen:
            return
        for seen in self._seen.values():
            seen.lost = seen.lost or self._age(seen) >= LEASE_S

    def _age(self, seen: _Seen) -> float:
        return (self._read_at or seen.heard_at) - seen.heard_at

    def _state(self, seen: _Seen) -> NodeState:
        if seen.lost:
            return NodeState.LOST
        if not seen.moved or self._age(seen) >= SUSPECT_AFTER_S:
            return NodeState.SUSPECT
        return NodeState.LIVE


def _newer(beat: Heartbeat, than: Heartbeat) -> bool:
    """A late message of the same session is not; a new session always is."""
    return beat.session != than.session or beat.seq > than.seq
