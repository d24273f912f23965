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
        self._clock = clock
        self._sent: deque[tuple[int, float]] = deque(maxlen=64)  # a minute of heartbeats
        self._until = clock()  # not valid until a first heartbeat is acknowledged

    def sent(self, seq: int) -> None:
        """A heartbeat is about to leave."""
        self._sent.append((seq, self._clock()))

    def acked(self, session: str, seq: int) -> None:
        """A watcher has seen heartbeat `seq`; another session's is not ours."""
        if session != self.session:
            return
        while self._sent and self._sent[0][0] <= seq:
            number, at = self._sent.popleft()
            if number == seq:
                self._until = max(self._until, at + self.lease_s)

    @property
    def until(self) -> float:
        """When the right ends unless another heartbeat is acknowledged."""
        return self._until

    @property
    def valid(self) -> bool:
        return self._clock() < self._until
