"""What the ledger keeps in the edge's journal: two small entries per request with items here.

    placement.offer.<request>    the newest Offer of which items were accepted, as it came
    placement.held.<request>     epoch and items; rewritten when a verdict arrives or an item ends

<request> is `<project>/<request id>`. A promise without items is a `held` entry alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from libdsec.wire.error import ErrorReply
from libdsec.wire.model import Message
from libdsec.wire.placement import Offer

PREFIX: Final = "placement."
_OFFER: Final = PREFIX + "offer."
_HELD: Final = PREFIX + "held."


class Writable(Protocol):
    """The part of the edge's journal that records are applied to."""

    def put(self, key: str, value: bytes) -> None: ...
    def drop(self, key: str) -> None: ...


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes

    def apply(self, journal: Writable) -> None:
        journal.put(self.key, self.value)


@dataclass(frozen=True)
class Drop:
    key: str

    def apply(self, journal: Writable) -> None:
        journal.drop(self.key)


Record = Put | Drop


class Stage(StrEnum):
    """How far an accepted item has come."""

    ACCEPTED = "accepted"  # promised to a scheduler; whether the claim names it is not known
    CONFIRMED = "confirmed"  # the claim names it: it may be announced, and may have been
    RELEASED = "released"  # its sandbox ended before it was announced


class HeldItem(Message):
    index: int
    sandbox_id: str
    stage: Stage
    error: ErrorReply | None = None  # why it was released
    retryable: bool = False


class InboxAddress(Message):
    request_id: str
    reply_to: str
    nonce: str


class HeldRequest(Message):
    epoch: int  # the highest seen or promised; lower offers are refused
    accepted_ms: int  # this node's wall clock, to know after a restart when to forget
    items: tuple[HeldItem, ...] = ()
    inboxes: tuple[InboxAddress, ...] = ()  # of callers that came back with the same key


RequestKey = tuple[str, str]  # project, request id


def put_offer(offer: Offer) -> Put:
    return Put(f"{_OFFER}{offer.project}/{offer.request_id}", offer.encode())


def put_held(key: RequestKey, held: HeldRequest) -> Put:
    return Put(f"{_HELD}{key[0]}/{key[1]}", held.encode())


def drop_request(key: RequestKey) -> tuple[Record, ...]:
    name = f"{key[0]}/{key[1]}"
    return Drop(_OFFER + name), Drop(_HELD + name)


def read_records(
    entries: Iterable[tuple[str, bytes]],
) -> tuple[dict[RequestKey, Offer], dict[RequestKey, HeldRequest]]:
    """The journal's entries by request. Raises pydantic's ValidationError on a foreign one."""
    offers: dict[RequestKey, Offer] = {}
    held: dict[RequestKey, HeldRequest] = {}
    for name, value in entries:
        if name.startswith(_OFFER):
            offers[_key(name, _OFFER)] = Offer.model_validate_json(value)
        elif name.startswith(_HELD):
            held[_key(name, _HELD)] = HeldRequest.model_validate_json(value)
    return offers, held


def _key(name: str, prefix: str) -> RequestKey:
    project, _, request_id = name[len(prefix) :].partition("/")
    return project, request_id
