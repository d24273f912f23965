"""How long a sandbox may still be: three stopwatches, and the rules of when each runs.

    idle      while running, nothing in progress, and the edge has its bus; activity resets it
    lifetime  while not paused
    paused    while paused; a resume resets it

Values of CLOCK_MONOTONIC, which all processes of one boot share, so that a successor goes on with
the numbers its predecessor journaled. Pure: the caller says what time it is.
"""

from __future__ import annotations

from enum import StrEnum

from libdsec.wire.sandbox import Lifetime


class Limit(StrEnum):
    """Which of a sandbox's times ran out."""

    IDLE = "idle_timeout_s"
    LIFETIME = "max_lifetime_s"
    PAUSED = "max_paused_s"


class Stopwatch:
    """Time that counts against a limit; it can stand still."""

    __slots__ = ("elapsed_s", "limit_s", "since")

    def __init__(self, limit_s: float, elapsed_s: float = 0.0, since: float | None = None) -> None:
        self.limit_s = limit_s
        self.elapsed_s = elapsed_s
        self.since = since

    def run(self, running: bool, now: float) -> None:
        if running and self.since is None:
            self.since = now
        elif not running and self.since is not None:
            self.elapsed_s += now - self.since
            self.since = None

    def reset(self, now: float) -> None:
        self.elapsed_s = 0.0
        if self.since is not None:
            self.since = now

    def read(self, now: float) -> float:
        return self.elapsed_s + (now - self.since if self.since is not None else 0.0)

    def remaining_s(self, now: float) -> float:
        return self.limit_s - self.read(now)

    def expired(self, now: float) -> bool:
        return self.since is not None and self.remaining_s(now) <= 0


class Clocks:
    """The three stopwatches of one sandbox, settled after every event."""

    __slots__ = ("_bus_up", "_busy", "_now_paused", "idle", "life", "paused")

    def __init__(self, lifetime: Lifetime, now: float, *, lived_s: float = 0.0) -> None:
        self.idle = Stopwatch(lifetime.idle_timeout_s)
        self.life = Stopwatch(lifetime.max_lifetime_s, lived_s)
        self.paused = Stopwatch(lifetime.max_paused_s)
        self._now_paused = False
        self._busy = 0
        self._bus_up = True
        self._settle(now)

    @property
    def busy(self) -> int:
        """What is in progress: commands, and calls that touch the sandbox."""
        return self._busy

    def begin(self, now: float) -> None:
        """A command or another activity begins; `end` follows."""
        self._busy += 1
        if self._busy == 1:
            self.idle.reset(now)
            self._settle(now)

    def end(self, now: float) -> None:
        self._busy -= 1
        if self._busy == 0:
            self.idle.reset(now)
            self._settle(now)

    def pause(self, now: float, *, already_s: float = 0.0) -> None:
        """`already_s`: how long a predecessor has seen it paused."""
        self._now_paused = True
        self.paused.elapsed_s = already_s
        self._settle(now)

    def resume(self, now: float) -> float:
        """Returns how long it was paused."""
        paused_s = self.paused.read(now)
        self._now_paused = False
        self._settle(now)
        self.paused.reset(now)
        self.idle.reset(now)
        return paused_s

    def set_bus(self, up: bool, now: float) -> None:
        """Without a bus nobody can use the sandbox, so it does not grow idle either."""
        if up != self._bus_up:
            self._bus_up = up
            self._settle(now)

    def set_limits(self, lifetime: Lifetime) -> None:
        self.idle.limit_s = lifetime.idle_timeout_s
        self.life.limit_s = lifetime.max_lifetime_s
        self.paused.limit_s = lifetime.max_paused_s

    def expired(self, now: float) -> Limit | None:
        """The limit that has run out; a stopwatch that stands still never does."""
        watches = (
            (Limit.LIFETIME, self.life),
            (Limit.PAUSED, self.paused),
            (Limit.IDLE, self.idle),
        )
        return next((limit for limit, watch in watches if watch.expired(now)), None)

    def next_check_s(self, now: float) -> float:
        """No limit can run out sooner than this, whatever happens but a change of the limits.

        A stopwatch that stands still needs at least its whole remainder once it runs, so activity
        never has to re-arm a timer.
        """
        return max(0.0, min(w.remaining_s(now) for w in (self.idle, self.life, self.paused)))

    def _settle(self, now: float) -> None:
        self.life.run(not self._now_paused, now)
        self.paused.run(self._now_paused, now)
        self.idle.run(not self._now_paused and self._busy == 0 and self._bus_up, now)
