"""From a request to a sandbox: queue, offer, acceptance, announcement (docs/adr/0003)."""

from __future__ import annotations

from enum import StrEnum

from .error import ErrorReply
from .layer import ResolvedLayers
from .model import Message
from .sandbox import SandboxSpec


class PlaceRequest(Message):
    """One create, or `count` alike ones. The project is the subject's, never the payload's."""

    request_id: str
    key: str  # idempotency key: one claim per message
    reply_to: str  # the client's inbox
    nonce: str  # echoed in every announcement
    count: int = 1
    budget_ms: int
    attempt: int = 1  # raised when an accepted item failed and is placed again
    spec: SandboxSpec


class Offer(Message):
    """A scheduler asks one edge for some items of one request."""

    request_id: str
    project: str
    epoch: int  # the claim's epoch under which this scheduler works; a lower one is refused
    session: str  # the edge's boot session that the scheduler believes in
    items: tuple[int, ...]
    reply_to: str
    nonce: str
    budget_ms: int
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


class WhoHas(Message):
    """Who holds items of this request? Answering promises to refuse offers below `epoch`."""

    request_id: str
    project: str
    epoch: int


class Holding(Message):
    node: str
    session: str
    items: tuple[AcceptedItem, ...] = ()


class ClaimState(StrEnum):
    PLACING = "placing"
    PLACED = "placed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Claim(Message):
    """(project, key) → what became of it. Written by schedulers only, by compare-and-set."""

    request_id: str
    digest: str  # of the arguments with every layer resolved
    epoch: int
    state: ClaimState
    items: tuple[AcceptedItem, ...] = ()
    count: int = 1
    error: ErrorReply | None = None


class Tombstone(Message):
    """A silent edge must not serve this request again before it has honoured this."""

    request_id: str
    epoch: int


class CancelRequest(Message):
    request_id: str
    key: str


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


class RetryRequest(Message):
    """An edge could not start accepted items; a scheduler places them again."""

    request_id: str
    project: str
    items: tuple[int, ...]
    reason: ErrorReply
    place: PlaceRequest
    key: str
