"""Carries out what the placement ledger decides: journal, then start, kill, announce, ask.

The ledger (`placement`) is pure; this is its only driver. The order is the protocol's: records are
durable before any effect, effects before the reply, and an announcement is handed to the bus in the
same step of the event loop in which the ledger allowed it.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

import structlog

from libdsec.bus import Bus, Call
from libdsec.errors import DeathReason, DSecError, InvalidArgument, SandboxDead, Unavailable
from libdsec.wire import subjects
from libdsec.wire.error import ErrorReply
from libdsec.wire.model import Empty
from libdsec.wire.node import HeartbeatAck
from libdsec.wire.placement import (
    AcceptedItem,
    Announcement,
    Holding,
    Offer,
    OfferReply,
    ReadyItem,
    Verdict,
    WhoHas,
)

from .admission import OperatingPoint, admit
from .facts import Facts
from .fault import Point
from .journal import JournalFullError
from .lifecycle import Lifecycle, as_refusal
from .node import Node
from .placement import (
    Admission,
    Announce,
    AskRetry,
    Effect,
    Inquire,
    Kill,
    Ledger,
    Start,
    Step,
)
from .record import Origin
from .sandbox import Sandbox
from .stock import Stock
from .table import Table, death_of
from .tasks import Tasks
from .timing import Phases

R = TypeVar("R")

_log = structlog.get_logger("edge.offers")

_TICK_S: Final = 0.25
_ASK_BUDGET_S: Final = 2.0
KIND_ANNOUNCE: Final = "announce"


class Offers:
    """The verbs of the placement protocol, and the tick that keeps its promises."""

    def __init__(
        self,
        node: Node,
        bus: Bus,
        ledger: Ledger,
        table: Table,
        lifecycle: Lifecycle,
        facts: Facts,
        point: OperatingPoint,
        tasks: Tasks,
        stock: Stock,
    ) -> None:
        self._node = node
        self._bus = bus
        self._ledger = ledger
        self._table = table
        self._lifecycle = lifecycle
        self._facts = facts
        self._point = point
        self._tasks = tasks
        self._stock = stock
        self._journal = node.records.journal

    # --- from the bus ---

    async def offer(self, offer: Offer, _call: Call) -> OfferReply:
        phases = Phases()
        with phases.phase("accepted"):
            step = self._ledger.offer(offer, lambda wanted: self._admit(offer, wanted))
            starts = [effect for effect in step.effects if isinstance(effect, Start)]
            entered = [self._enter(start) for start in starts]  # the next offer is judged with them
            try:
                await self._durable(step)
            except JournalFullError as err:
                self._ledger.take_back(step)
                for sandbox in entered:
                    self._table.drop(sandbox.id)
                raise Unavailable(f"node {self._node.name} cannot keep a promise: {err}") from err
            self._node.fault(Point.AFTER_ACCEPT_FSYNC)
        for start, sandbox in zip(starts, entered, strict=True):
            self._start(start, sandbox, phases)
        self._node.fault(Point.BEFORE_OFFER_REPLY)
        return step.reply

    async def whohas(self, ask: WhoHas, _call: Call) -> Holding:
        """The answer is a promise too: without room for it there is no answer."""
        step = self._ledger.whohas(ask)
        try:
            await self._durable(step)
        except JournalFullError as err:
            raise Unavailable(f"node {self._node.name} cannot keep a promise: {err}") from err
        return step.reply

    async def verdict(self, verdict: Verdict, _call: Call) -> None:
        await self._drive(self._ledger.verdicts([verdict]))

    async def announce_again(self, verdict: Verdict, _call: Call) -> Empty:
        await self._drive(self._ledger.announce_again(verdict))
        return Empty()

    async def withdraw(self, verdict: Verdict, _call: Call) -> Empty:
        await self._drive(self._ledger.withdraw(verdict))
        return Empty()

    async def heartbeat_ack(self, ack: HeartbeatAck, _call: Call) -> None:
        self._ledger.lease.acked(ack.session, ack.seq)

    # --- from the edge ---

    async def run(self) -> None:
        while True:
            await self._drive(self._ledger.tick())
            await self._node.clock.sleep(_TICK_S)

    def follow(self, sandbox: Sandbox) -> None:
        """Tell the ledger when it ends."""
        sandbox.gone.add_done_callback(
            lambda gone: self._tasks.spawn(
                self._gone(sandbox.id, gone.result()), name=f"gone {sandbox.id}"
            )
        )

    async def resume(self, step: Step[None]) -> None:
        """Go on where a predecessor stopped: what it had accepted is started."""
        await self._drive(step)

    # --- inside ---

    def _admit(self, offer: Offer, wanted: int) -> Admission:
        facts = self._facts.read(self._table)
        room, refusal = admit(facts, self._point, offer.spec, wanted)
        return Admission(room, ErrorReply.of(refusal) if refusal is not None else None)

    async def _durable(self, step: Step[R]) -> None:
        """A record may forget a sandbox that is to be killed, so its end is written before that: a
        successor that found neither would let it live."""
        for effect in step.effects:
            if isinstance(effect, Kill):
                self._doom(effect.sandbox_id)
        for record in step.records:
            record.apply(self._journal)
        await self._journal.sync()

    async def _drive(self, step: Step[R]) -> R:
        """What is not an answer to somebody does not wait for room in the journal: after a restart
        the ledger would ask again, and announcing or killing twice does no harm."""
        try:
            await self._durable(step)
        except JournalFullError as err:
            _log.error("placement not journaled", error=str(err))
        for effect in step.effects:
            await self._carry_out(effect)
        return step.reply

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Start():
                self._start(effect, self._enter(effect), Phases())
            case Kill():
                self._tasks.spawn(self._kill(effect), name=f"kill {effect.sandbox_id}")
            case Announce():
                await self._announce(effect)
            case Inquire():
                self._tasks.spawn(self._inquire(effect), name="inquire")
            case AskRetry():
                self._tasks.spawn(self._ask_retry(effect), name="ask retry")

    def _enter(self, effect: Start) -> Sandbox:
        """Into the table, and into account."""
        offer = effect.offer
        origin = Origin(
            sandbox_id=effect.sandbox_id,
            project=offer.project,
            request_id=offer.request_id,
            index=effect.index,
            spec=offer.spec,
            image=offer.layers.config,
            digests=tuple(layer.digest for layer in offer.layers.all),
            created_at=self._node.clock.wall_s(),
        )
        self._stock.wanted(offer.spec.resources)
        return self._lifecycle.accept(origin)

    def _start(self, effect: Start, sandbox: Sandbox, accepted: Phases) -> None:
        phases = Phases()  # of each item its own
        phases.ms |= {"queued": effect.offer.queued_ms, **accepted.ms}
        self._tasks.spawn(self._create(sandbox, effect, phases), name=f"create {sandbox.id}")

    async def _create(self, sandbox: Sandbox, effect: Start, phases: Phases) -> None:
        try:
            await self._lifecycle.create(sandbox, effect.offer.layers, phases)
        except asyncio.CancelledError:
            raise  # abandoned: the ledger has forgotten it, or a successor starts it anew
        except Exception as err:
            refusal = as_refusal(err)
            _log.warning("create failed", sandbox=sandbox.id, code=refusal.code, error=repr(err),
                         exc_info=None if isinstance(err, DSecError) else err)  # fmt: skip
            await self._drive(
                self._ledger.failed(sandbox.id, ErrorReply.of(refusal), retryable=refusal.retryable)
            )
            return
        self.follow(sandbox)
        await self._drive(self._ledger.ready(sandbox.id))

    def _doom(self, sandbox_id: str) -> None:
        sandbox = self._table.get(sandbox_id)
        if sandbox is None:
            return
        if sandbox.starting is not None:
            sandbox.starting.cancel()  # what is not in the journal is swept by a successor
        elif sandbox.status.ending is None:
            sandbox.update(self._node.records, ending=DeathReason.STOPPED)

    async def _kill(self, effect: Kill) -> None:
        sandbox = self._table.get(effect.sandbox_id)
        if sandbox is not None:
            await self._lifecycle.end(sandbox, DeathReason.STOPPED, effect.why)

    async def _gone(self, sandbox_id: str, death: SandboxDead) -> None:
        await self._drive(self._ledger.gone(sandbox_id, ErrorReply.of(death)))

    async def _announce(self, effect: Announce) -> None:
        """The bus has it before this first suspends. The ledger judged the lease before the sync,
        which may have taken long: without a lease now, it is asked again at a later tick."""
        self._node.fault(Point.BEFORE_ANNOUNCE)
        if not self._ledger.lease.valid:
            self._ledger.announce_failed(effect)
            return
        try:
            await self._bus.send(
                effect.reply_to,
                KIND_ANNOUNCE,
                self._announcement(effect),
                nonce=effect.nonce,
                wait_s=0.0,
            )
        except InvalidArgument as err:
            _log.warning("nobody to announce to", request=effect.request_id, error=str(err))
        except DSecError:
            self._ledger.announce_failed(effect)

    def _announcement(self, effect: Announce) -> Announcement:
        ready: list[ReadyItem] = []
        failed = dict(effect.failed)
        for item in effect.ready:
            sandbox = self._table.get(item.sandbox_id)
            if sandbox is not None and sandbox.journaled:
                ready.append(self._ready_item(item, sandbox))
            else:
                failed[item.index] = ErrorReply.of(self._absent(item.sandbox_id))
        return Announcement(
            request_id=effect.request_id,
            node=self._node.name,
            ready=tuple(ready),
            failed=failed,
        )

    async def _inquire(self, effect: Inquire) -> None:
        try:
            answer = await self._bus.request(
                subjects.INQUIRE, effect.inquiry, node=self._node.name, budget_s=_ASK_BUDGET_S
            )
        except DSecError:
            return  # the ledger asks again
        await self._drive(self._ledger.verdicts(answer.verdicts))

    async def _ask_retry(self, effect: AskRetry) -> None:
        request = effect.request
        try:
            reply = await self._bus.request(
                subjects.RETRY, request, node=self._node.name, budget_s=_ASK_BUDGET_S
            )
        except DSecError:
            return  # the ledger asks again
        await self._drive(self._ledger.retried(request.project, request.items, reply.again))

    def _ready_item(self, item: AcceptedItem, sandbox: Sandbox) -> ReadyItem:
        return ReadyItem(
            index=item.index,
            sandbox_id=item.sandbox_id,
            node=self._node.name,
            created_at=sandbox.origin.created_at,
            phases_ms=sandbox.status.phases_ms,
        )

    def _absent(self, sandbox_id: str) -> DSecError:
        dead = self._table.dead(sandbox_id)
        if dead is not None:
            return death_of(dead)
        return SandboxDead(f"sandbox {sandbox_id} is gone", reason=DeathReason.NODE_LOST)
