"""What the ledger asks its driver to do, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from libdsec.wire.error import ErrorReply
from libdsec.wire.placement import AcceptedItem, Inquiry, Offer, RetryRequest

from .records import Record

Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Start:
    """Start this sandbox; report with `ready` or `failed`."""

    sandbox_id: str
    index: int
    offer: Offer  # the spec, the layers, the project, the budget that was left at the offer


@dataclass(frozen=True)
class Kill:
    """Stop the sandbox or abandon its start; it was never announced, or its request has ended."""

    sandbox_id: str
    why: str


@dataclass(frozen=True)
class Announce:
    """Send one Announcement to `reply_to`: these are ready, these failed for good."""

    project: str
    request_id: str
    reply_to: str
    nonce: str
    ready: tuple[AcceptedItem, ...] = ()
    failed: dict[int, ErrorReply] = field(default_factory=dict)


@dataclass(frozen=True)
class Inquire:
    """Ask a scheduler (`INQUIRE`) and hand the answer to `verdicts`; no answer needs no report."""

    inquiry: Inquiry


@dataclass(frozen=True)
class AskRetry:
    """Ask a scheduler (`RETRY`) to place these again; call `retried` once it has agreed."""

    request: RetryRequest


Effect = Start | Kill | Announce | Inquire | AskRetry


@dataclass(frozen=True)
class Step(Generic[Reply]):
    """Make `records` durable, then carry out `effects`, then send `reply`."""

    reply: Reply
    records: tuple[Record, ...] = ()
    effects: tuple[Effect, ...] = ()
