"""What the ledger keeps in the edge's journal: two small entries per request that it holds items of.

    placement.offer.<request>    the first Offer accepted, as it came; written once
    placement.held.<request>     epoch and items; rewritten when a verdict arrives or an item ends

<request> is `<project>/<request id>`. A promise without items is a `held` entry alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from libdsec.wire.error import ErrorReply
from libdsec.wire.model import Message
from libdsec.wire.placement import Offer

PREFIX = "placement."
_OFFER = PREFIX + "offer."
_HELD = PREFIX + "held."


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
    """How far an accepted item has come; only `announced` may outlive a broken lease."""

    ACCEPTED = "accepted"  # promised to a scheduler, not yet named by the claim as far as we know
    CONFIRMED = "confirmed"  # the claim names it: it may be announced, and may have been
    RELEASED = "released"  # its sandbox died before it was announced


class HeldItem(Message):
    index: int
    sandbox_id: str
    stage: Stage
    error: ErrorReply | None = None  # why it was released


class HeldRequest(Message):
    epoch: int  # the highest seen or promised; lower offers are refused
    accepted_ms: int  # wall clock of this node, to know across a restart when to forget
    items: tuple[HeldItem, ...] = ()


RequestKey = tuple[str, str]  # project, request id


def put_offer(offer: Offer) -> Put:
    return Put(f"{_OFFER}{offer.project}/{offer.request_id}", offer.encode())


def put_held(key: RequestKey, held: HeldRequest) -> Put:
    return Put(f"{_HELD}{key[0]}/{key[1]}", held.encode())


def drop_request(key: RequestKey) -> tuple[Drop, Drop]:
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
