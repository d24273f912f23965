"""The right to announce: held while a watcher has recently seen this node.

Judged by this node's monotonic clock alone, counted from the moment the acknowledged heartbeat was
*sent*, so it always ends here before anybody else can believe that it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class AnnounceLease:
    """Heartbeats out, acknowledgements in; `valid` is the right."""

    def __init__(self, session: str, clock: Callable[[], float], lease_s: float) -> None:
        self.session = session
        self.lease_s = lease_s
        self.breaks = 0  # how often it was had again after it had ended
        self.last_sent = 0
        self._clock = clock
        self._sent: deque[tuple[int, float]] = deque(maxlen=64)  # a minute of heartbeats
        self._until: float | None = None

    def sent(self, seq: int) -> None:
        """A heartbeat is about to leave."""
        self.last_sent = seq
        self._sent.append((seq, self._clock()))

    def acked(self, session: str, seq: int) -> None:
        """A watcher has seen heartbeat `seq`; another session's is not ours."""
        if session != self.session:
            return
        while self._sent and self._sent[0][0] <= seq:
            number, at = self._sent.popleft()
            if number == seq and at + self.lease_s > self._clock():
                self._extend(at + self.lease_s)

    def _extend(self, until: float) -> None:
        if self._until is not None and self._until <= self._clock():
            self.breaks += 1
        self._until = max(self._until or until, until)

    @property
    def valid(self) -> bool:
        return self._until is not None and self._clock() < self._until
