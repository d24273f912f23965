"""Time: the only module that reads the wall clock.

Durations and leases are measured on the monotonic clock. The wall clock is for records that people
read. Two hosts' clocks are never compared: what JetStream stored and when is judged by the server's
own time, which `ServerTime` follows.
"""

from __future__ import annotations

import asyncio
import time

_RESYNC_S = 60.0


class Clock:
    """The clocks of this process; tests put a made-up one in its place."""

    def wall_s(self) -> float:
        """Seconds since the epoch, for records."""
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class ServerTime:
    """The NATS server's wall clock as seen from here, good to half a round trip."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s: float | None = None
        self._as_of_s = -_RESYNC_S

    @property
    def stale(self) -> bool:
        return self._clock.monotonic_s() - self._as_of_s >= _RESYNC_S

    def observe(self, server_s: float, asked_s: float) -> None:
        """The server said `server_s` in answer to what was asked at `asked_s` (monotonic)."""
        now_s = self._clock.monotonic_s()
        self._offset_s = server_s - (asked_s + now_s) / 2
        self._as_of_s = now_s

    def age_s(self, stored_s: float) -> float:
        """How long ago the server stored something; 0 while its clock is not known."""
        if self._offset_s is None:
            return 0.0
        return max(0.0, self._clock.monotonic_s() + self._offset_s - stored_s)
