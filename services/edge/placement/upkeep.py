"""What time does to the ledger: items that nobody confirmed end, questions are asked again, and
requests that are settled are forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from libdsec.errors import Unavailable
from libdsec.wire.error import ErrorReply
from libdsec.wire.placement import Held, Inquiry

from .effects import Effect, Inquire, Kill
from .held import Item, Request
from .records import Record, drop_request, put_held

ASK_AGAIN_S: Final = 1.0
PROMISE_S: Final = 600.0  # a promise without items is kept this long; no offer lives longer
INQUIRY_REQUESTS: Final = 64  # in one message; the rest waits for the next tick

_UNCONFIRMED: Final = "no scheduler confirmed it within one lease"
_LEASE_LOST: Final = "the node lost its lease before it could be announced"


@dataclass
class Upkeep:
    """What one pass found to do."""

    records: list[Record] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    forgotten: list[Request] = field(default_factory=list)
    questions: list[Held] = field(default_factory=list)


def upkeep(
    requests: Iterable[Request], node: str, now: float, lease_s: float, *, broken: bool, holds: bool
) -> Upkeep:
    """One pass. `broken`: the lease ended since the last one; `holds`: it is held now."""
    work = Upkeep()
    for request in requests:
        _expire(request, work, now, broken)
        if holds:
            work.effects += request.announcements()
            _ask(request, work, node, now)
        if now > request.expires + 2 * lease_s and all(
            i.settled or not i.lives for i in request.items.values()
        ):
            work.forgotten.append(request)
            work.records += drop_request(request.key)
    if work.questions:
        work.effects.append(Inquire(Inquiry(held=tuple(work.questions))))
    return work


def _expire(request: Request, work: Upkeep, now: float, broken: bool) -> None:
    ended = False
    for item in request.items.values():
        if not item.lives:
            continue
        if item.told:
            item.recheck = item.recheck or broken
        elif broken or (item.undecided and now > item.deadline):
            _release(item, work, _LEASE_LOST if broken else _UNCONFIRMED)
            ended = True
    if ended:
        work.records.append(put_held(request.key, request.record()))


def _release(item: Item, work: Upkeep, why: str) -> None:
    work.effects.append(Kill(item.sandbox_id, why))
    item.release(ErrorReply.of(Unavailable(f"{item.sandbox_id}: {why}")), retryable=True)


def _ask(request: Request, work: Upkeep, node: str, now: float) -> None:
    """Put what only a scheduler can settle to one, again and again until it is."""
    if now < request.ask_at:
        return
    retry = request.ask_retry(node, now)
    if retry is not None:
        work.effects.append(retry)
        request.ask_at = now + ASK_AGAIN_S
    held = request.inquiry()
    if held is not None and len(work.questions) < INQUIRY_REQUESTS:
        work.questions.append(held)
        request.ask_at = now + ASK_AGAIN_S
