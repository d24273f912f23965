"""Typed access to KV buckets: one message type per bucket, compare-and-set, watches that resume.

A bucket is a JetStream stream with one subject per key; this speaks to the server directly so that
budgets, refusals and lost connections are the bus's typed errors, like those of any request. With
replicas a read may be a moment old; a compare-and-set never is, so what was read is only acted upon
through one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import ValidationError

from libdsec.bus import Bus, PubAck, ttl_header
from libdsec.errors import AlreadyExists, Conflict, DataLoss, InvalidArgument
from libdsec.wire.envelope import Bucket
from libdsec.wire.model import Message

from .stored import StoredMessage, last_message

M = TypeVar("M", bound=Message)

_KEY = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*")
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_OPERATION = "KV-Operation"
_TTL = "Nats-TTL"
_MARKER = "Nats-Marker-Reason"  # of the server's own markers, as for an expired key
_PURGE = {_OPERATION: "PURGE", "Nats-Rollup": "sub"}


@dataclass(frozen=True, slots=True)
class Entry(Generic[M]):
    """A key's value and the revision that a compare-and-set must name."""

    key: str
    value: M
    revision: int


class KeyValue(Generic[M]):
    """One bucket, which `ensure_topology` has made."""

    def __init__(self, bus: Bus, bucket: Bucket[M], *, budget_s: float = 5.0) -> None:
        self.bucket = bucket
        self._bus = bus
        self._prefix = f"$KV.{bucket.name}."
        self._label = f"$KV.{bucket.name}"
        self._budget_s = budget_s

    async def get(self, key: str) -> Entry[M] | None:
        """The current value, or None when there is none or it has been deleted.

        Raises:
            DataLoss: what is stored is not of the bucket's type.
        """
        stored = await self._last(key)
        if stored is None or is_gone(stored.headers):
            return None
        return Entry(key, self.decode(key, stored.data), stored.seq)

    async def put(self, key: str, value: M, *, ttl_s: float | None = None) -> int:
        """Write whatever was there; returns the revision."""
        return await self._publish(key, value.encode(), ttl_s, {})

    async def create(self, key: str, value: M, *, ttl_s: float | None = None) -> int:
        """Write the first value.

        Raises:
            AlreadyExists: the key has one.
        """
        try:
            return await self._publish(key, value.encode(), ttl_s, {_EXPECTED: "0"})
        except Conflict as err:
            marker = await self._last(key)
            if marker is None or not is_gone(marker.headers):
                raise AlreadyExists(f"{key} exists in {self.bucket.name}") from err
        # What blocks the way is the marker of a deletion or an expiry.
        try:
            return await self.update(key, value, marker.seq, ttl_s=ttl_s)
        except Conflict as err:
            raise AlreadyExists(f"{key} exists in {self.bucket.name}") from err

    async def update(self, key: str, value: M, revision: int, *, ttl_s: float | None = None) -> int:
        """Write if `revision` is still the last one.

        Raises:
            Conflict: it is not.
        """
        return await self._publish(key, value.encode(), ttl_s, {_EXPECTED: str(revision)})

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        """Remove the key, if `revision` is given only from that one.

        Raises:
            Conflict: the last revision is another one.
        """
        expected = {} if revision is None else {_EXPECTED: str(revision)}
        await self._publish(key, b"", None, {**_PURGE, **expected})

    def key(self, subject: str) -> str:
        return subject.removeprefix(self._prefix)

    def subject_filter(self, keys: str) -> str:
        """The subjects of all keys that match, with NATS's wildcards."""
        return self._prefix + keys

    def subject(self, key: str) -> str:
        """Raises InvalidArgument for what is no key."""
        if not _KEY.fullmatch(key):
            raise InvalidArgument(
                f"{key[:80]!r} is not a key", hint="keys are tokens of [A-Za-z0-9_=/-] with dots"
            )
        return self._prefix + key

    async def _publish(
        self, key: str, data: bytes, ttl_s: float | None, headers: dict[str, str]
    ) -> int:
        subject = self.subject(key)
        if ttl_s is not None:
            headers = {**headers, _TTL: ttl_header(ttl_s)}
        answer = await self._bus.ask_server(
            subject, data, label=self._label, budget_s=self._budget_s, headers=headers
        )
        return PubAck.read(answer.data, subject).seq

    async def _last(self, key: str) -> StoredMessage | None:
        subject = self.subject(key)
        stream = f"KV_{self.bucket.name}"
        return await last_message(self._bus, stream, subject, budget_s=self._budget_s)

    def decode(self, key: str, data: bytes) -> M:
        """Raises DataLoss for what is not of the bucket's type."""
        try:
            return self.bucket.message.model_validate_json(data)
        except ValidationError as err:
            raise DataLoss(
                f"{key} in {self.bucket.name} is not a {self.bucket.message.__name__}",
                hint="was it written by another version?",
            ) from err


def is_gone(headers: dict[str, str] | None) -> bool:
    """Whether a message only marks that its key was deleted or has expired."""
    lowered = {name.lower(): value for name, value in (headers or {}).items()}
    return lowered.get(_OPERATION.lower()) in ("DEL", "PURGE") or _MARKER.lower() in lowered
