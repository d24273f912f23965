"""One delivery's hold on a claim: what it stores, what it offers, what edges have accepted.

`protocol` decides what is done when; the steps are here. Invariants:

* The claim names at most one sandbox per item at any time, and is written by compare-and-set alone.
* An edge is told `confirmed` only after the claim that names the sandbox has been stored.
* Offers are made only under an epoch that this scheduler has itself stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from libdsec.errors import DSecError
from libdsec.wire.defaults import OFFER_TIMEOUT_S, WHOHAS_TIMEOUT_S
from libdsec.wire.error import ErrorReply
from libdsec.wire.layer import ResolvedLayers
from libdsec.wire.placement import (
    AcceptedItem,
    Claim,
    ClaimState,
    Offer,
    OfferReply,
    PlaceRequest,
    Verdict,
    WhoHas,
    claim_key,
)

from .claims import by_node, missing, owned_by, withdrawals
from .effects import (
    AskWhoHas,
    ChoosePools,
    MakeOffers,
    ReadClaim,
    ResolveLayers,
    Steps,
    Tell,
    Withdraw,
    WriteClaim,
    do,
)
from .filters import Need
from .limits import fault_of
from .placement import Choice

WITHDRAW_TIMEOUT_S: Final = 2.0


class Cluster(Protocol):
    """The nodes as this scheduler sees them. No I/O."""

    def now(self) -> float: ...
    def objection(self, need: Need) -> DSecError | None:
        """Why no node will ever take this, if that is so."""

    def choose(self, need: Need, count: int, exclude: Collection[str]) -> Choice:
        """Nodes for up to `count` items; they count as load until `answered`."""

    def answered(self, node: str, asked: int, reply: OfferReply | None) -> None: ...
    def session(self, node: str) -> str: ...
    def names(self) -> frozenset[str]:
        """The nodes that can be expected to answer."""

    def lost(self, node: str) -> bool: ...


@dataclass(frozen=True)
class Job:
    """One delivery of a request."""

    project: str
    request: PlaceRequest
    digest: str
    deliveries: int
    deadline: float  # on the cluster's clock
    queued_ms: float = 0.0


class Attempt:
    """prepare -> create, or advance a stored claim -> offer (and find) -> commit."""

    claim: Claim
    layers: ResolvedLayers
    need: Need

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job = job
        self.request = job.request
        self.cluster = cluster
        self.key = claim_key(job.project, job.request.key)
        self.revision = 0
        self.refusals: list[ErrorReply] = []
        self._fresh: dict[int, str] = {}  # accepted by an edge, not yet in the stored claim

    @property
    def left_s(self) -> float:
        return self.job.deadline - self.cluster.now()

    @property
    def missing(self) -> list[int]:
        """Items that nobody is known to have accepted."""
        return [i for i in missing(self.claim) if i not in self._fresh]

    @property
    def items(self) -> tuple[AcceptedItem, ...]:
        named = {item.index: item.sandbox_id for item in self.claim.items} | self._fresh
        return tuple(AcceptedItem(index=i, sandbox_id=named[i]) for i in sorted(named))

    def prepare(self, claim: Claim | None) -> Steps[DSecError | None]:
        """Resolve the layers, to what they meant at first if there is a claim already. An error if
        the request can never be placed."""
        fault = fault_of(self.request.spec)
        if fault is not None:
            return fault
        pinned = claim.layers if claim is not None else ()
        resolve = ResolveLayers(self.job.project, self.request.spec, pinned)
        layers = yield from do(resolve)
        if isinstance(layers, DSecError):
            return layers
        self.layers = layers
        pools = yield from do(ChoosePools(self.job.project, self.request.spec, layers))
        self.need = Need(self.request.spec, pools, frozenset(self.request.avoid))
        return self.cluster.objection(self.need)

    # --- the claim ---

    def create(self) -> Steps[bool]:
        """False: the key is claimed already."""
        self.claim = Claim(
            request_id=self.request.request_id,
            digest=self.job.digest,
            epoch=1,
            state=ClaimState.PLACING,
            count=self.request.count,
            layers=tuple(layer.ref for layer in self.layers.all),
        )
        return (yield from self.store(self.claim))

    def advance(self) -> Steps[bool]:
        """Store the claim under a new epoch: what was offered under the old one is void unless it
        is found and taken over. False: somebody else has written it."""
        claim = owned_by(self.claim, self.request.request_id).model_copy(
            update={
                "digest": self.job.digest,
                "count": self.request.count,
                "epoch": self.claim.epoch + 1,
                "state": ClaimState.PLACING,
                "layers": tuple(layer.ref for layer in self.layers.all),
                "items": self.items,
                "failed": {},
            }
        )
        return (yield from self.store(claim))

    def commit(self, state: ClaimState, failed: dict[int, ErrorReply]) -> Steps[bool]:
        """Store what has been accepted and tell the edges. False: others have moved the claim on.

        An edge that asked about an item may have had it named already; that is merged, not fought.
        """
        for _ in range(3):
            fresh = self._fresh
            update = {"state": state, "items": self.items, "failed": failed}
            if (yield from self.store(self.claim.model_copy(update=update))):
                named = [AcceptedItem(index=i, sandbox_id=s) for i, s in fresh.items()]
                for node, verdict in self.verdicts(named).items():
                    yield from do(Tell(node, verdict))
                return True
            stored = yield from do(ReadClaim(self.key))
            ours = (self.claim.request_id, self.claim.epoch)
            if stored is None or (stored.claim.request_id, stored.claim.epoch) != ours:
                return False
            self.claim, self.revision = stored.claim, stored.revision
            taken = {item.index for item in self.claim.items}
            self._fresh = {i: s for i, s in fresh.items() if i not in taken}
        return False

    def store(self, claim: Claim) -> Steps[bool]:
        revision = yield from do(WriteClaim(self.key, claim, self.revision))
        if revision is None:
            return False
        self.claim, self.revision, self._fresh = claim, revision, {}
        return True

    # --- the edges ---

    def offer(self, choice: Choice, tried: set[str]) -> Steps[frozenset[str]]:
        """One round. Gives the nodes that did not answer: nobody knows what they hold."""
        todo = iter(self.missing)
        offers = {
            node: self._offer_to(node, tuple(next(todo) for _ in range(count)))
            for node, count in choice.groups.items()
        }
        timeout_s = min(self.left_s, OFFER_TIMEOUT_S)
        replies = yield from do(MakeOffers(offers, timeout_s))
        for node, offer in offers.items():
            reply = replies.get(node)
            self.cluster.answered(node, len(offer.items), reply)
            if reply is not None:
                self._take(reply.accepted, offer.items)
            if reply is not None and reply.refused is not None:
                self.refusals.append(reply.refused)
            if reply is None or (reply.refused is not None and reply.session == offer.session):
                tried.add(node)
        return frozenset(node for node in offers if replies.get(node) is None)

    def find(self, request_id: str, nodes: frozenset[str]) -> Steps[None]:
        """Take over what is held under an older epoch; who does not answer has lost it."""
        ask = WhoHas(request_id=request_id, project=self.job.project, epoch=self.claim.epoch)
        for holding in (yield from do(AskWhoHas(ask, nodes, WHOHAS_TIMEOUT_S))):
            self._take(holding.items, self.missing)

    def withdraw(self) -> Steps[None]:
        """Have another go at what cancelled requests with this key have left behind."""
        groups = by_node(self.claim.condemned)
        if groups:
            verdicts = withdrawals(self.claim, self.job.project)
            agreed = yield from do(Withdraw(verdicts, WITHDRAW_TIMEOUT_S))
            left = tuple(i for node, items in groups.items() if node not in agreed for i in items)
            self.claim = self.claim.model_copy(update={"condemned": left})  # stored with the next

    def verdicts(self, items: Iterable[AcceptedItem]) -> dict[str, Verdict]:
        """That the claim names these, for each node."""
        return {
            node: Verdict(
                request_id=self.request.request_id,
                project=self.job.project,
                epoch=self.claim.epoch,
                confirmed=group,
                reply_to=self.request.reply_to,
                nonce=self.request.nonce,
            )
            for node, group in by_node(items).items()
        }

    def _offer_to(self, node: str, items: tuple[int, ...]) -> Offer:
        request = self.request
        return Offer(
            request_id=request.request_id,
            project=self.job.project,
            key=request.key,
            epoch=self.claim.epoch,
            session=self.cluster.session(node),
            items=items,
            count=request.count,
            attempt=request.attempt,
            avoid=request.avoid,
            reply_to=request.reply_to,
            nonce=request.nonce,
            budget_ms=max(0, int(1e3 * self.left_s)),
            queued_ms=self.job.queued_ms,
            spec=request.spec,
            layers=self.layers,
        )

    def _take(self, accepted: Iterable[AcceptedItem], wanted: Collection[int]) -> None:
        """The first sandbox of an item counts; edges let go of any other when they ask."""
        open_items = set(self.missing)
        for item in accepted:
            if item.index in wanted and item.index in open_items:
                self._fresh[item.index] = item.sandbox_id
                open_items.discard(item.index)
