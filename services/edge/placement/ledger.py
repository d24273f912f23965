"""What this node has accepted and whom it may announce: the edge's half of the placement protocol.

Invariants:

* A sandbox is announced only after a verdict said that its request's claim names it, and only while
  the lease is held. After a broken lease the claim is asked again before anything else is said.
* An item that was never announced ends within one lease: of its acceptance if no verdict came, of
  the last acknowledged heartbeat otherwise.
* An offer below an epoch once seen or promised is refused, also after a restart.

The driver's rules are in the package's docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from libdsec.errors import Conflict, DSecError, NoCapacity, SandboxDead, Unavailable
from libdsec.wire.defaults import LEASE_S
from libdsec.wire.error import ErrorReply
from libdsec.wire.ids import new_sandbox_id
from libdsec.wire.placement import AcceptedItem, Holding, Offer, OfferReply, Verdict, WhoHas

from .effects import Announce, Effect, Kill, Start, Step
from .held import Item, Request
from .lease import AnnounceLease
from .records import (
    InboxAddress,
    Record,
    RequestKey,
    Stage,
    put_held,
    put_offer,
    read_records,
)
from .upkeep import ASK_AGAIN_S, PROMISE_S, upkeep


@dataclass(frozen=True)
class Admission:
    """How many of the wanted sandboxes the node takes now, and why not the rest."""

    room: int
    refused: ErrorReply | None = None


class Fate(Enum):
    """What the edge's own journal and the host say of a sandbox after a restart.

    One that never got as far as ready has none: what is left of it is swept and it starts anew.
    After a reboot of the host everything that had once been ready is dead.
    """

    RUNNING = "running"  # adopted, and ready
    DEAD = "dead"  # it was ready once and is gone


class Ledger:
    """Not thread-safe; every call happens on the event loop."""

    def __init__(
        self,
        *,
        node: str,
        incarnation: str,
        session: str,  # new at every start of the edge
        clock: Callable[[], float],  # monotonic seconds
        wall_ms: Callable[[], int],
        lease_s: float = LEASE_S,
        new_id: Callable[[str, str], str] = new_sandbox_id,
    ) -> None:
        self.node = node
        self.session = session
        self.lease = AnnounceLease(session, clock, lease_s)
        self._incarnation = incarnation
        self._clock = clock
        self._wall_ms = wall_ms
        self._new_id = new_id
        self._requests: dict[RequestKey, Request] = {}
        self._owners: dict[str, tuple[Request, Item]] = {}  # by sandbox id
        self._had_lease = False  # as the last tick saw it
        self._breaks = 0

    # --- from the bus ---

    def offer(self, offer: Offer, admit: Callable[[int], Admission]) -> Step[OfferReply]:
        """OFFER. `admit` is called at most once, with the number of new sandboxes wanted; what it
        admits counts as taken at once. A repeated offer gets the same sandboxes again."""
        key = (offer.project, offer.request_id)
        refusal = self._refusal(offer, self._requests.get(key))
        if refusal is not None:
            return Step(OfferReply(refused=ErrorReply.of(refusal), session=self.session))
        request = self._requests.get(key) or self._new_request(key)
        request.epoch = offer.epoch
        wanted = [i for i in offer.items if i not in request.items]
        admission = admit(len(wanted)) if wanted else Admission(0)
        new = [self._new_item(request, i) for i in wanted[: admission.room]]
        if new:
            request.offer = offer
            request.expires = self._clock() + offer.budget_ms / 1e3
        living = [i for k in offer.items if (i := request.items.get(k)) is not None and i.lives]
        for item in living:  # accepted anew, under this epoch
            item.deadline = self._clock() + self.lease.lease_s
        request.ask_at = self._clock() + ASK_AGAIN_S
        refused = None
        if len(living) < len(offer.items):
            refused = admission.refused or ErrorReply.of(NoCapacity(f"node {self.node} is full"))
        reply = OfferReply(
            accepted=tuple(i.pair for i in living),
            refused=refused,
            session=self.session,
            heartbeat_seq=self.lease.last_sent,
        )
        records: list[Record] = [put_offer(offer)] if new else []
        if living:  # a mere refusal is not worth a write
            records.append(put_held(key, request.record()))
        starts = tuple(Start(item.sandbox_id, item.index, offer) for item in new)
        return Step(reply, tuple(records), starts)

    def take_back(self, step: Step[OfferReply]) -> None:
        """The journal did not take the step's records: what it had accepted never was."""
        for effect in step.effects:
            if isinstance(effect, Start):
                self._forget(*self._owners[effect.sandbox_id])

    def whohas(self, ask: WhoHas) -> Step[Holding]:
        """WHOHAS: what we hold of it, and a promise to refuse offers of a lower epoch."""
        key = (ask.project, ask.request_id)
        request = self._requests.get(key) or self._new_request(key)
        request.epoch = max(request.epoch, ask.epoch)
        living = [i for i in request.items.values() if i.lives]
        for item in living:
            item.deadline = self._clock() + self.lease.lease_s
        pairs = tuple(i.pair for i in living)
        reply = Holding(node=self.node, session=self.session, items=pairs)
        return Step(reply, (put_held(key, request.record()),))

    def verdicts(self, verdicts: Iterable[Verdict]) -> Step[None]:
        """VERDICT, or the answers to Inquire: confirmed items may be announced, lost ones end."""
        touched: dict[RequestKey, Request] = {}
        kills: list[Effect] = []
        for verdict in verdicts:
            for request, item in self._named(verdict.project, verdict.confirmed):
                if verdict.reply_to and not item.settled:
                    request.add_inbox(_inbox(verdict))
                item.confirm()
                touched[request.key] = request
            for request, item in self._named(verdict.project, verdict.lost):
                if item.lives:
                    kills.append(Kill(item.sandbox_id, "the claim of its request has another"))
                self._forget(request, item)
                touched[request.key] = request
        dues = [effect for request in touched.values() for effect in self._dues(request)]
        records = tuple(put_held(key, request.record()) for key, request in touched.items())
        return Step(None, records, (*kills, *dues))

    def announce_again(self, verdict: Verdict) -> Step[None]:
        """ANNOUNCE: the caller came back with the same key and another inbox. Items that are long
        settled are in the effect too: the driver looks them up among its sandboxes and reports
        those that are gone as failed (SandboxDead).

        Raises:
            Unavailable: the node may not announce just now; the scheduler asks again.
        """
        if not self._may_announce:
            raise _without_lease(self.node)
        inbox = _inbox(verdict)
        known = self._named(verdict.project, verdict.confirmed)
        ids = {item.sandbox_id for _, item in known}
        ready = [p for p in verdict.confirmed if p.sandbox_id not in ids]
        failed: dict[int, ErrorReply] = {}
        for _, item in known:
            if item.settled and item.error is not None:
                failed[item.index] = item.error
            elif item.settled:
                ready.append(item.pair)
        step = self.verdicts([verdict])
        if not ready and not failed:
            return step
        told = Announce(
            verdict.project, inbox.request_id, inbox.reply_to, inbox.nonce, tuple(ready), failed
        )
        return Step(None, step.records, (told, *step.effects))

    def withdraw(self, verdict: Verdict) -> Step[None]:
        """WITHDRAW: the request is cancelled; its sandboxes end, the long settled ones too."""
        known = {item.sandbox_id for _, item in self._named(verdict.project, verdict.lost)}
        others = [p.sandbox_id for p in verdict.lost if p.sandbox_id not in known]
        step = self.verdicts([verdict])
        kills = tuple(Kill(sandbox_id, "its request was cancelled") for sandbox_id in others)
        return Step(None, step.records, (*kills, *step.effects))

    # --- from the edge itself ---

    def ready(self, sandbox_id: str) -> Step[None]:
        """It has started, and the edge's journal says so: announce it as soon as it may be."""
        if sandbox_id not in self._owners:
            return Step(None)
        request, item = self._owners[sandbox_id]
        item.ready = True
        return Step(None, (), self._dues(request))

    def failed(self, sandbox_id: str, error: ErrorReply, *, retryable: bool) -> Step[None]:
        """It could not be started and nothing of it is left."""
        if not self.owns(sandbox_id):
            return Step(None)
        request, item = self._owners[sandbox_id]
        item.release(error, retryable=retryable)
        request.ask_at = 0.0
        return Step(None, (put_held(request.key, request.record()),), self._dues(request))

    def gone(self, sandbox_id: str, error: ErrorReply | None = None) -> Step[None]:
        """It ended after it was ready: stopped, expired, killed, dead (`error` says of what)."""
        if not self.owns(sandbox_id):
            return Step(None)
        request, item = self._owners[sandbox_id]
        if item.settled:
            self._forget(request, item)
            return Step(None, (put_held(request.key, request.record()),))
        error = error or ErrorReply.of(SandboxDead(f"{sandbox_id} ended before it was announced"))
        return self.failed(sandbox_id, error, retryable=True)

    def retried(
        self, project: str, pairs: Iterable[AcceptedItem], again: Collection[int]
    ) -> Step[None]:
        """A scheduler has answered an AskRetry: those of the indices `again` are its business now,
        the others have failed. Callers that came back with the same key are told that all have:
        nobody else knows their inboxes."""
        touched: dict[RequestKey, Request] = {}
        told: list[Effect] = []
        for request, item in self._named(project, pairs):
            if not item.lives and item.error is not None:
                self._forget(request, item)
                touched[request.key] = request
                failed = {item.index: item.error}
                to = request.inboxes if item.index in again else request.addresses()
                told += [request.announce(inbox, (), failed) for inbox in to]
        return Step(None, tuple(put_held(k, r.record()) for k, r in touched.items()), tuple(told))

    def announce_failed(self, announce: Announce) -> None:
        """The bus did not take the announcement; the ledger will ask for it again."""
        for _, item in self._named(announce.project, announce.ready):
            item.due = True
        request = self._requests.get((announce.project, announce.request_id))
        for index in announce.failed:
            if request is not None and index in request.items:
                request.items[index].due = True

    def tick(self) -> Step[None]:
        """Expiries, inquiries, retries, settled requests; every 0.25 s."""
        holds = self.lease.valid
        broken = (self._had_lease and not holds) or self.lease.breaks != self._breaks
        self._had_lease, self._breaks = holds, self.lease.breaks
        work = upkeep(
            self._requests.values(), self.node, self._clock(), self.lease.lease_s,
            broken=broken, holds=holds,
        )  # fmt: skip
        for request in work.forgotten:
            del self._requests[request.key]
            for item in request.items.values():
                del self._owners[item.sandbox_id]
        return Step(None, tuple(work.records), tuple(work.effects))

    def restore(
        self, entries: Iterable[tuple[str, bytes]], fates: Mapping[str, Fate]
    ) -> Step[None]:
        """After a start: go on with what was accepted; the rest is asked about once the lease is
        held. Only an empty ledger restores."""
        assert not self._requests, "a ledger restores once, before it serves"
        offers, held = read_records(entries)
        effects: list[Effect] = []
        for key, record in held.items():
            request = self._new_request(key)
            request.epoch, request.accepted_ms = record.epoch, record.accepted_ms
            request.inboxes, request.offer = list(record.inboxes), offers.get(key)
            if request.offer is not None:
                request.expires = self._clock() + self._left_s(request.offer, record.accepted_ms)
            for kept in record.items:
                item = self._new_item(request, kept.index, kept.sandbox_id)
                item.stage, item.error, item.retryable = kept.stage, kept.error, kept.retryable
                if _resume(item, fates.get(item.sandbox_id)) and request.offer is not None:
                    effects.append(Start(item.sandbox_id, item.index, request.offer))
        return Step(None, (), tuple(effects))

    # --- to look at ---

    @property
    def unannounced(self) -> int:
        """Items accepted and not announced yet."""
        return sum(item.lives and not item.told for _, item in self._owners.values())

    def owns(self, sandbox_id: str) -> bool:
        """Whether an item of this sandbox is held here and lives."""
        return sandbox_id in self._owners and self._owners[sandbox_id][1].lives

    # --- inside ---

    def _refusal(self, offer: Offer, request: Request | None) -> DSecError | None:
        if not self.lease.valid:
            return _without_lease(self.node)
        if offer.session != self.session:
            return Unavailable(f"node {self.node} has restarted: session {offer.session} is over")
        if request is not None and offer.epoch < request.epoch:
            return Conflict(
                f"offer of epoch {offer.epoch} is refused: {request.epoch} has been promised"
            )
        return None

    @property
    def _may_announce(self) -> bool:
        """Whether the lease is held, and was never broken without the ledger having seen to it."""
        return self.lease.valid and self.lease.breaks == self._breaks

    def _new_request(self, key: RequestKey) -> Request:
        request = Request(key, 0, self._wall_ms(), self._clock() + PROMISE_S)
        self._requests[key] = request
        return request

    def _new_item(self, request: Request, index: int, sandbox_id: str | None = None) -> Item:
        sandbox_id = sandbox_id or self._new_id(self.node, self._incarnation)
        item = Item(index, sandbox_id, self._clock() + self.lease.lease_s)
        request.items[index] = item
        self._owners[sandbox_id] = (request, item)
        return item

    def _forget(self, request: Request, item: Item) -> None:
        del request.items[item.index], self._owners[item.sandbox_id]

    def _named(self, project: str, pairs: Iterable[AcceptedItem]) -> list[tuple[Request, Item]]:
        """Those of the pairs that are held here: the same sandbox, index and project."""
        found = [(self._owners.get(p.sandbox_id), p.index) for p in pairs]
        return [
            held
            for held, index in found
            if held is not None and held[0].key[0] == project and held[1].index == index
        ]

    def _left_s(self, offer: Offer, accepted_ms: int) -> float:
        """What is left of a budget after a restart; a clock that was set cannot make it longer."""
        budget_s = offer.budget_ms / 1e3
        return min(budget_s, max(0.0, budget_s - (self._wall_ms() - accepted_ms) / 1e3))

    def _dues(self, request: Request) -> tuple[Effect, ...]:
        """What can be said of a request now."""
        if not self._may_announce:
            return ()
        retry = request.ask_retry(self.node, self._clock())
        return (*request.announcements(), *((retry,) if retry else ()))


def _resume(item: Item, fate: Fate | None) -> bool:
    """Put a restored item where it was; whether its sandbox has to be started (again)."""
    if not item.lives:
        return False
    item.recheck = item.stage is Stage.CONFIRMED
    item.told = item.recheck and fate is not None  # ready and confirmed: perhaps announced
    item.due = not item.told
    item.ready = fate is Fate.RUNNING
    if fate is Fate.DEAD:
        dead = SandboxDead(f"{item.sandbox_id} ended while its edge was away")
        item.release(ErrorReply.of(dead), retryable=True)
    return fate is None


def _without_lease(node: str) -> Unavailable:
    return Unavailable(f"node {node} may not announce: no watcher acknowledges its heartbeats")


def _inbox(verdict: Verdict) -> InboxAddress:
    return InboxAddress(
        request_id=verdict.request_id, reply_to=verdict.reply_to, nonce=verdict.nonce
    )
