"""From a request to a sandbox: queue, claim, offer, acceptance, verdict, announcement.

The rule behind all of it (docs/adr/0003): the claim decides. An edge may announce a sandbox only
after a verdict told it that the claim of its request names that sandbox, and the claim is written
by compare-and-set alone. An acceptance that no verdict confirms is gone within one lease.
"""

from __future__ import annotations

import base64
import hashlib
from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from .defaults import CREATE_MANY_MESSAGE
from .error import ErrorReply
from .layer import ResolvedLayers
from .model import Message
from .sandbox import SandboxSpec

MAX_ATTEMPTS: Final = 3  # placements of an item whose start fails, before it fails for good

PAST_REQUESTS: Final = 8

# What a name may be that becomes part of a journal's or a bucket's key.
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class PlaceRequest(Message):
    """One create, or `count` alike ones. The project is the subject's, never the payload's."""

    request_id: RequestId
    key: str = Field(min_length=1, max_length=256)  # idempotency key: one claim per message
    reply_to: str = Field(pattern=r"^_INBOX\.[^\s*>]+$")  # the client's inbox
    nonce: str  # echoed in every announcement
    count: int = Field(default=1, ge=1, le=CREATE_MANY_MESSAGE)
    budget_ms: int = Field(ge=0)
    attempt: int = 1  # raised when an accepted item failed and is placed again
    avoid: tuple[str, ...] = ()  # nodes that have failed it already
    spec: SandboxSpec


class Offer(Message):
    """A scheduler asks one edge for some items of one request."""

    request_id: RequestId
    project: str
    key: str
    epoch: int  # the claim's epoch under which this scheduler works; a lower one is refused
    session: str  # the edge's boot session that the scheduler believes in
    items: tuple[int, ...]
    count: int = 1  # of the whole request
    attempt: int = 1
    avoid: tuple[str, ...] = ()
    reply_to: str
    nonce: str
    budget_ms: int
    queued_ms: float = 0.0  # from the publish to this offer, for the record of the create
    spec: SandboxSpec
    layers: ResolvedLayers


class AcceptedItem(Message):
    index: int
    sandbox_id: str


class OfferReply(Message):
    """The node has the last word: some items accepted (fsynced), the rest refused and why."""

    accepted: tuple[AcceptedItem, ...] = ()
    refused: ErrorReply | None = None  # for every item not accepted
    session: str = ""
    heartbeat_seq: int = 0  # of the last heartbeat that does not show these items yet


class WhoHas(Message):
    """Who holds items of this request? Answering promises to refuse offers below `epoch`."""

    request_id: RequestId
    project: str
    epoch: int


class Holding(Message):
    node: str
    session: str
    items: tuple[AcceptedItem, ...] = ()


class ClaimState(StrEnum):
    PLACING = "placing"  # a scheduler is at it; offers under this epoch may be under way
    WAITING = "waiting"  # no offer is under way; the request is in the queue
    PLACED = "placed"  # every item has a sandbox or a final error
    FAILED = "failed"  # for good, with nothing placed
    CANCELLED = "cancelled"


class Claim(Message):
    """(project, key) → what became of it. Written by schedulers only, by compare-and-set."""

    request_id: str  # the newest request with this key; it alone can cancel
    past: tuple[str, ...] = ()  # earlier ones, and cancelled ones; at most PAST_REQUESTS
    digest: str  # of the arguments as the caller gave them; "" before they were seen
    epoch: int
    state: ClaimState
    count: int = 1
    layers: tuple[str, ...] = ()  # references with versions: what the names meant at first
    items: tuple[AcceptedItem, ...] = ()
    failed: dict[int, ErrorReply] = {}
    condemned: tuple[AcceptedItem, ...] = ()  # of cancelled requests, until their nodes agree


def claim_key(project: str, key: str) -> str:
    """The key of a claim in its bucket; callers' keys may hold what a bucket's keys may not."""
    digest = hashlib.blake2b(key.encode(), digest_size=20).digest()
    return f"{project}.{base64.b32encode(digest).decode().lower()}"


class Verdict(Message):
    """Which sandboxes of a request its claim names, and which it never will.

    `confirmed` ones are to be announced to `reply_to` as they become ready; `lost` ones are to be
    killed. What is in neither is undecided.
    """

    request_id: str
    project: str
    epoch: int = 0
    confirmed: tuple[AcceptedItem, ...] = ()
    lost: tuple[AcceptedItem, ...] = ()
    reply_to: str = ""  # "": as in the offer
    nonce: str = ""


class Held(Message):
    """What an edge holds of one request and wants a verdict on."""

    request_id: str
    project: str
    key: str
    epoch: int
    items: tuple[AcceptedItem, ...] = ()  # alive: the claim takes them over if it still can
    ended: tuple[AcceptedItem, ...] = ()  # dead before they were announced: does it name them?


class Inquiry(Message):
    held: tuple[Held, ...]


class Verdicts(Message):
    verdicts: tuple[Verdict, ...] = ()


class CancelRequest(Message):
    """The caller wants nothing more of this request than what it already has."""

    request_id: RequestId
    key: str
    keep: tuple[str, ...] = ()  # sandboxes it goes on using


class Progress(Message):
    """Why a request still waits; sent to its inbox with kind `progress`."""

    request_id: str
    reason: str
    position: int | None = None
    dropped_by_filter: dict[str, int] = {}


class ReadyItem(Message):
    index: int
    sandbox_id: str
    node: str
    created_at: float
    phases_ms: dict[str, float] = {}


class Announcement(Message):
    """Sent to the inbox with kind `announce`: items that are ready, items that failed for good."""

    request_id: str
    node: str = ""
    ready: tuple[ReadyItem, ...] = ()
    failed: dict[int, ErrorReply] = {}


class RetryReply(Message):
    """The indices that are being placed again. The others have failed, and their caller, whom
    nobody else knows, is to be told so by the edge."""

    again: tuple[int, ...] = ()


class RetryRequest(Message):
    """Confirmed items that an edge could not start; a scheduler frees them in the claim and puts
    `place`, with the attempt raised, into the queue again."""

    request_id: str
    project: str
    items: tuple[AcceptedItem, ...]
    reason: ErrorReply
    place: PlaceRequest
