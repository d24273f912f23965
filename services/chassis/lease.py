"""Leadership by a key: at most one holder at any time, whatever the hosts' clocks say.

The holder writes the key again every third of the lease. A contender takes it over when the key's
revision has not moved for a whole lease *by the contender's own monotonic clock*; the holder stops
counting itself as one after two thirds of a lease without a write that was confirmed, counted from
before that write, by its own. So nobody compares two clocks, and a paused or cut-off holder is out
before its successor is in. `token` grows with every term: what the leader writes elsewhere carries
it, and readers refuse a smaller one.
"""

from __future__ import annotations

import asyncio
import logging

from libdsec.errors import AlreadyExists, Conflict, DeadlineExceeded, DSecError, Unavailable
from libdsec.wire.lease import LeaseRecord

from .clock import Clock
from .kv import KeyValue

_log = logging.getLogger("dsec.lease")


class Lease:
    """One contender for one key. Lifecycle: `run` as a task → read `held`, `token` → `release`."""

    def __init__(
        self,
        kv: KeyValue[LeaseRecord],
        key: str,
        holder: str,
        *,
        lease_s: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self._kv = kv
        self._key = key
        self._holder = holder
        self._lease_s = lease_s
        self._clock = clock or Clock()
        self._valid_until_s = -1.0
        self._revision = 0
        self._beat = 0
        self._seen_revision = -1
        self._seen_at_s = 0.0
        self._stopping = False
        self.token = 0

    @property
    def held(self) -> bool:
        """To be asked right before acting as the leader."""
        return self._clock.monotonic_s() < self._valid_until_s

    async def run(self) -> None:
        """Contend and renew for as long as the process runs."""
        while not self._stopping:
            try:
                async with asyncio.timeout(self._lease_s / 3):
                    await (self._renew() if self._revision else self._contend())
            except (Unavailable, DeadlineExceeded, TimeoutError) as err:
                _log.warning("lease %s: %s", self._key, err)
            except DSecError:
                _log.exception("lease %s", self._key)
            await self._clock.sleep(self._lease_s / 3)

    async def release(self) -> None:
        """Give it up now, so that the next holder need not wait a lease."""
        self._stopping = True
        revision, self._revision = self._revision, 0
        self._valid_until_s = -1.0
        if revision:
            try:
                await self._kv.update(self._key, LeaseRecord(holder=""), revision)
            except DSecError as err:
                _log.info("lease %s was not given up: %s", self._key, err)

    async def _renew(self) -> None:
        asked_s = self._clock.monotonic_s()
        self._beat += 1
        record = LeaseRecord(holder=self._holder, beat=self._beat)
        try:
            revision = await self._kv.update(self._key, record, self._revision)
        except Conflict:
            await self._sort_out()
            return
        if not self._stopping:
            self._hold(revision, asked_s)

    async def _sort_out(self) -> None:
        """The key moved: by our own write whose confirmation got lost, or by a successor.

        Our own one does not prolong anything, for a contender may have seen it long ago: it only
        names the revision from which the next renewal goes on.
        """
        entry = await self._kv.get(self._key)
        if entry is not None and entry.value.holder == self._holder:
            self._revision = entry.revision
        else:
            self._lose()

    async def _contend(self) -> None:
        asked_s = self._clock.monotonic_s()
        entry = await self._kv.get(self._key)
        record = LeaseRecord(holder=self._holder)
        try:
            if entry is None:
                revision = await self._kv.create(self._key, record)
            elif self._free(entry.revision, entry.value):
                revision = await self._kv.update(self._key, record, entry.revision)
            else:
                return
        except (AlreadyExists, Conflict):
            return  # another contender was quicker
        self.token = revision
        self._hold(revision, asked_s)
        _log.info("lease %s is ours, token %d", self._key, revision)

    def _free(self, revision: int, record: LeaseRecord) -> bool:
        now_s = self._clock.monotonic_s()
        if revision != self._seen_revision:
            self._seen_revision, self._seen_at_s = revision, now_s
        return not record.holder or now_s - self._seen_at_s >= self._lease_s

    def _hold(self, revision: int, asked_s: float) -> None:
        self._revision = revision
        self._valid_until_s = asked_s + self._lease_s * 2 / 3

    def _lose(self) -> None:
        _log.warning("lease %s is another's", self._key)
        self._revision = 0
        self._valid_until_s = -1.0
