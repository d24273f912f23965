"""How full the local nodes are, and a switch that does not flutter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from libdsec.wire.defaults import SUSPECT_AFTER_S
from libdsec.wire.node import Heartbeat

LOCAL: Final = "local"


@dataclass
class Hysteresis:
    """On from `start`, off again only at `stop` or below."""

    start: float
    stop: float
    on: bool = False

    def feed(self, value: float) -> bool:
        if value >= self.start:
            self.on = True
        elif value <= self.stop:
            self.on = False
        return self.on


class Fleet:
    """The last heartbeat of each node, by the reader's own monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, Heartbeat]] = {}

    def hear(self, beat: Heartbeat, now_s: float) -> None:
        """A repeated or late heartbeat does not make a node younger."""
        known = self._seen.get(beat.node)
        if known and known[1].session == beat.session and beat.seq <= known[1].seq:
            return
        self._seen[beat.node] = (now_s, beat)

    def forget_silent(self, now_s: float, after_s: float) -> None:
        self._seen = {n: pair for n, pair in self._seen.items() if now_s - pair[0] <= after_s}

    def pools(self, now_s: float) -> set[str]:
        """Pools that have a healthy node."""
        return {beat.pool for beat in self._healthy(now_s)}

    def utilisation(self, now_s: float) -> float:
        """Mean load of the healthy local nodes; 0 when there are none to be full."""
        loads = [beat.load.value for beat in self._healthy(now_s) if beat.pool == LOCAL]
        return sum(loads) / len(loads) if loads else 0.0

    def _healthy(self, now_s: float) -> list[Heartbeat]:
        return [
            beat
            for heard, beat in self._seen.values()
            if now_s - heard <= SUSPECT_AFTER_S and not beat.cordoned and not beat.draining
        ]
