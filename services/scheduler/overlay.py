"""This scheduler's own recent placements, counted as load until the view shows them.

An edge's acceptance names the last heartbeat that does not show it; the first later one does. So
the overlay ends exactly when the view takes over, by sequence numbers, whatever anybody's clock
says. What a node did not answer for is counted for a moment only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from libdsec.wire.node import Heartbeat

FORGET_S: Final = 10.0  # a node whose heartbeats stop is judged by its state, not by this
UNKNOWN_S: Final = 3.0


@dataclass
class _Placed:
    count: int
    after_seq: int
    session: str
    until: float


class Overlay:
    """add -> answered; `shown` at each new heartbeat."""

    def __init__(self) -> None:
        self._offered: defaultdict[str, int] = defaultdict(int)
        self._placed: defaultdict[str, list[_Placed]] = defaultdict(list)

    def count(self, node: str) -> int:
        """Items that are on the node or under way to it, and not in its heartbeat."""
        placed = self._placed.get(node)
        return self._offered.get(node, 0) + (sum(p.count for p in placed) if placed else 0)

    def add(self, node: str, count: int) -> None:
        """Items are about to be offered."""
        self._offered[node] += count

    def answered(
        self, node: str, asked: int, accepted: int | None, after_seq: int, session: str, now: float
    ) -> None:
        """The offer is over. `accepted` None: no answer."""
        self._offered[node] = max(0, self._offered[node] - asked)
        if accepted is None:
            self._placed[node].append(_Placed(asked, 0, "", now + UNKNOWN_S))
        elif accepted:
            self._placed[node].append(_Placed(accepted, after_seq, session, now + FORGET_S))

    def shown(self, node: str, beat: Heartbeat, now: float) -> None:
        """The view has this heartbeat now."""
        placed = self._placed.get(node)
        if not placed:
            return
        left = [p for p in placed if now < p.until and not _shows(beat, p)]
        if left:
            self._placed[node] = left
        else:
            del self._placed[node]


def _shows(beat: Heartbeat, placed: _Placed) -> bool:
    if not placed.session:
        return False
    return beat.session != placed.session or beat.seq > placed.after_seq
