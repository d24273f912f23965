"""Watching a bucket: everything there is, then every change, across any outage.

The watch is an ephemeral pull consumer that is made anew whenever it may have been lost. Each time
all current values are read again and compared with what was known, so that the reader sees one
consistent sequence: a key that went away meanwhile is reported as gone, whatever became of its
marker, and a value is never repeated with an older revision.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from libdsec.bus import Bus
from libdsec.errors import DataLoss, NotFound, Unavailable
from libdsec.wire.model import Message, random_token

from .clock import Clock
from .kv import KeyValue, is_gone
from .pull import Puller

M = TypeVar("M", bound=Message)

_log = logging.getLogger("dsec.kv")

_BATCH = 256
_PULL_S = 2.0  # also how long a lost consumer goes unnoticed
_IDLE_CONSUMER_S = 60.0
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Change(Generic[M]):
    """A key's new value; None: it is gone.

    Attributes:
        current: everything that existed when the watch began, or began again, has been reported by
            now. True for all later changes.
    """

    key: str
    value: M | None
    revision: int
    current: bool


async def watch(
    bus: Bus, kv: KeyValue[M], keys: str = ">", *, clock: Clock | None = None
) -> AsyncGenerator[Change[M], None]:
    """All values under `keys` (`>`, `job.*`), then their changes, until the caller stops.

    Values that are not of the bucket's type are logged and left out.
    """
    clock = clock or Clock()
    known: dict[str, int] = {}
    while True:
        try:
            async for change in _Pass(bus, kv, keys, known).changes():
                yield change
        except (NatsError, Unavailable, NotFound, TimeoutError) as err:
            _log.info("watch of %s begins again: %r", kv.bucket.name, err)
        await clock.sleep(_RETRY_S)


async def scan(bus: Bus, kv: KeyValue[M], keys: str = ">") -> dict[str, M]:
    """All values under `keys` as of now.

    Raises:
        Unavailable: JetStream does not answer.
    """
    values: dict[str, M] = {}
    try:
        async for change in _Pass(bus, kv, keys, {}).changes(once=True):
            if change.value is not None:
                values[change.key] = change.value
    except (NatsError, NotFound, TimeoutError) as err:
        raise Unavailable(f"bucket {kv.bucket.name} cannot be read: {err}") from err
    return values


class _Pass(Generic[M]):
    """One consumer's life: from all current values to the moment it may have been lost."""

    def __init__(self, bus: Bus, kv: KeyValue[M], keys: str, known: dict[str, int]) -> None:
        self._bus = bus
        self._kv = kv
        self._keys = keys
        self._known = known  # key → revision, of all keys that exist
        self._seen: set[str] = set()

    async def changes(self, *, once: bool = False) -> AsyncIterator[Change[M]]:
        """Raises whatever says that the consumer is lost; with `once` it ends when current."""
        stream = f"KV_{self._kv.bucket.name}"
        consumer, initial = await self._create(stream)
        async with Puller(self._bus, stream, consumer) as puller:
            current = initial == 0
            if current:
                for gone in self._vanished():
                    yield gone
            while not (once and current):
                for msg in await puller.pull(_BATCH, wait_s=_PULL_S):
                    initial -= 1
                    if (change := self._change(msg, current)) is not None:
                        yield change
                    if initial == 0:
                        current = True
                        for gone in self._vanished():
                            yield gone

    async def _create(self, stream: str) -> tuple[str, int]:
        name = f"watch-{random_token(8)}"
        info = await self._bus.nats.jetstream(timeout=5).add_consumer(
            stream,
            ConsumerConfig(
                name=name,
                deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
                ack_policy=AckPolicy.NONE,
                filter_subject=self._kv.subject_filter(self._keys),
                inactive_threshold=_IDLE_CONSUMER_S,
                mem_storage=True,
                num_replicas=1,
            ),
        )
        return name, info.num_pending or 0

    def _change(self, msg: Msg, current: bool) -> Change[M] | None:
        """What a message means to the reader; None when it is nothing new."""
        revision = msg.metadata.sequence.stream
        key = self._kv.key(msg.subject)
        self._seen.add(key)
        if is_gone(msg.headers):
            known = self._known.pop(key, None)
            return Change(key, None, revision, current) if known is not None else None
        if self._known.get(key, 0) >= revision:
            return None
        try:
            value = self._kv.decode(key, msg.data)
        except DataLoss as err:
            _log.error("left out of a watch: %s", err)
            return None
        self._known[key] = revision
        return Change(key, value, revision, current)

    def _vanished(self) -> list[Change[M]]:
        """Keys known from an earlier pass that no longer exist, not even as a marker."""
        gone = [key for key in self._known if key not in self._seen]
        return [Change(key, None, self._known.pop(key), True) for key in gone]
