"""What this node has accepted and whom it may announce: the edge's half of the placement protocol.

SIGNATURES (being filled in; names and arguments below are stable).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from libdsec.wire.defaults import LEASE_S
from libdsec.wire.error import ErrorReply
from libdsec.wire.placement import Holding, Offer, OfferReply, Verdict, Verdicts, WhoHas

from .effects import Step
from .lease import AnnounceLease


@dataclass(frozen=True)
class Admission:
    """How many of the wanted sandboxes the node takes now, and why not the rest."""

    room: int
    refused: ErrorReply | None = None


class Fate(Enum):
    """What the edge's own journal and the host say of a sandbox after a restart."""

    RUNNING = "running"  # adopted, and as good as ready
    DEAD = "dead"  # it was ready once and is gone
    # absent: never got as far as ready; whatever is left of it was swept, and it is started anew


class Ledger:
    """See the package for how it is driven. Not thread-safe; all calls on the event loop."""

    lease: AnnounceLease

    def __init__(
        self,
        *,
        node: str,
        incarnation: str,
        session: str,  # new at every start of the edge
        clock: Callable[[], float],  # monotonic seconds
        wall_ms: Callable[[], int],
        lease_s: float = LEASE_S,
    ) -> None: ...

    # --- from the bus ---
    def offer(self, offer: Offer, admit: Callable[[int], Admission]) -> Step[OfferReply]:
        """OFFER. `admit` is called at most once, with the number of new sandboxes wanted; what it
        admits counts as taken at once. A repeated offer gets the same sandboxes again."""

    def whohas(self, ask: WhoHas) -> Step[Holding]:
        """WHOHAS: what we hold of it, and a promise to refuse offers of a lower epoch."""

    def verdict(self, verdict: Verdict) -> Step[None]:
        """VERDICT, or one of the answers to Inquire."""

    def verdicts(self, verdicts: Verdicts) -> Step[None]: ...

    def announce_again(self, verdict: Verdict) -> Step[None]:
        """ANNOUNCE: the caller came back with the same key and another inbox. Items that the ledger
        has forgotten (long settled) are in the Announce effect too: the driver looks them up among
        its sandboxes and answers SandboxDead in `failed` for those that are gone."""

    # --- from the edge itself ---
    def ready(self, sandbox_id: str) -> Step[None]:
        """Started: announce it as soon as it may be."""

    def failed(self, sandbox_id: str, error: ErrorReply, *, retryable: bool) -> Step[None]:
        """It could not be started, or died before it was announced; nothing of it is left."""

    def gone(self, sandbox_id: str) -> Step[None]:
        """It ended (stopped, expired, killed, dead). Unannounced: as `failed`, retryable."""

    def retried(self, sandbox_ids: Iterable[str]) -> Step[None]:
        """A scheduler has taken over the items of an AskRetry."""

    def announce_failed(self, sandbox_ids: Iterable[str]) -> None:
        """The bus did not take the announcement; the ledger will ask for it again."""

    def tick(self) -> Step[None]:
        """Expiries, inquiries, retries, settled requests; every 0.25 s."""

    def restore(
        self, entries: Iterable[tuple[str, bytes]], fates: Mapping[str, Fate]
    ) -> Step[None]:
        """After a start: read the journal, go on with what was accepted, ask about the rest."""

    # --- to look at ---
    @property
    def accepted(self) -> int:
        """Items held and not announced yet."""

    def owns(self, sandbox_id: str) -> bool:
        """Whether this sandbox's item is known and not released (a sweep kills what nobody owns)."""
