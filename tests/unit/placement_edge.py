"""An edge in the simulated world: a driver of the real ledger, with a host that outlives it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from libdsec.errors import Unavailable
from libdsec.wire.error import ErrorReply
from libdsec.wire.model import Message
from libdsec.wire.node import Heartbeat, Load
from libdsec.wire.placement import (
    Offer,
    RetryReply,
    RetryRequest,
    Verdict,
    Verdicts,
    WhoHas,
)
from services.edge.placement import (
    Admission,
    Announce,
    AskRetry,
    Fate,
    Inquire,
    Kill,
    Ledger,
    Start,
    Step,
)

if TYPE_CHECKING:
    from .placement_world import World


@dataclass
class Letter:
    """A message on its way. `to` is an edge's name, "schedulers", or the id of a caller."""

    to: str
    sender: str
    body: Any
    reply: Callable[[Any], None] | None = None


@dataclass
class Sandbox:
    """A sandbox on a host: it goes on when its edge dies."""

    sandbox_id: str
    index: int
    offer: Offer
    accepted_at: float
    ready: bool = False


class Edge:
    """A driver of the real ledger, with a host and a journal that outlive the process."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.world = world
        self.journal: dict[str, bytes] = {}
        self.host: dict[str, Sandbox] = {}
        self.was_ready: set[str] = set()  # the edge's own journal: what had been ready once
        self.boots = 0
        self.seq = 0
        self.up = False
        self.connected = True
        self.wall_skew_ms = 0
        self.connected_at = 0.0
        self.room = 100
        self.todo: list[tuple[Step[Any], Callable[[Any], None] | None]] = []
        self.start()

    # --- process ---

    def start(self) -> None:
        self.boots += 1
        self.up, self.up_at, self.todo = True, self.world.now, []
        self.ledger = Ledger(
            node=self.name, incarnation="aaaaaa", session=f"s{self.boots}", clock=self.world.clock,
            wall_ms=lambda: int(self.world.now * 1e3) + self.wall_skew_ms,
            new_id=lambda node, inc: self.world.new_id(node),
        )  # fmt: skip
        fates = {}
        for sandbox_id in self.was_ready:
            fates[sandbox_id] = Fate.RUNNING if sandbox_id in self.host else Fate.DEAD
        for sandbox_id in [s for s in self.host if s not in fates]:
            del self.host[sandbox_id]  # half started: swept
        self.perform(self.ledger.restore(list(self.journal.items()), fates), None)
        for sandbox_id in [s for s in self.host if s not in self.world.told]:
            if not self.ledger.owns(sandbox_id):
                del self.host[sandbox_id]  # what no record knows is swept

    def crash(self) -> None:
        self.up, self.todo = False, []

    # --- what the shell does with a step ---

    def step(self, step: Step[Any], reply: Callable[[Any], None] | None = None) -> None:
        """Records first: what needs a write waits for `sync`."""
        if step.records or (self.todo and (step.effects or reply)):
            self.todo.append((step, reply))
        else:
            self.perform(step, reply)

    def sync(self) -> None:
        todo, self.todo = self.todo, []
        for step, _ in todo:
            for record in step.records:
                record.apply(self)
        for step, reply in todo:
            self.perform(step, reply)

    def put(self, key: str, value: bytes) -> None:
        self.journal[key] = value

    def drop(self, key: str) -> None:
        self.journal.pop(key, None)

    def perform(self, step: Step[Any], reply: Callable[[Any], None] | None) -> None:
        for effect in step.effects:
            match effect:
                case Start(sandbox_id, index, offer):
                    self.host[sandbox_id] = Sandbox(sandbox_id, index, offer, self.world.now)
                case Kill(sandbox_id, _):
                    if self.host.pop(sandbox_id, None):
                        self.world.killed.add(sandbox_id)
                    self.was_ready.discard(sandbox_id)
                case Announce():
                    self.announce(effect)
                case Inquire(inquiry):
                    self.send("schedulers", inquiry, self._verdicts)
                case AskRetry(request):
                    self.send("schedulers", request, lambda a, r=request: self._retried(r, a))
        if reply is not None:
            reply(step.reply)

    def _verdicts(self, reply: Verdicts) -> None:
        self.step(self.ledger.verdicts(reply.verdicts))

    def _retried(self, request: RetryRequest, reply: RetryReply) -> None:
        self.step(self.ledger.retried(request.project, request.items, reply.again))

    def announce(self, announce: Announce) -> None:
        """What the real driver does: sandboxes that are gone are reported as failed."""
        if not self.connected:
            self.ledger.announce_failed(announce)
            return
        ready, failed = [], dict(announce.failed)
        for pair in announce.ready:
            if pair.sandbox_id in self.host and self.host[pair.sandbox_id].ready:
                ready.append(pair)
            else:
                failed[pair.index] = ErrorReply(code="sandbox_dead", message="gone")
        self.world.announced(self, announce, ready)
        body = (announce.request_id, {p.index: p.sandbox_id for p in ready}, failed)
        self.world.letters.append(Letter(announce.reply_to, self.name, body))

    def send(self, to: str, body: Message, back: Callable[[Any], None]) -> None:
        if not self.connected:
            return
        boots = self.boots

        def reply(answer: Any) -> None:
            def deliver(got: Any) -> None:
                if self.up and self.boots == boots:
                    back(got)

            self.world.letters.append(Letter(self.name, to, answer, deliver))

        self.world.letters.append(Letter(to, self.name, body, reply))

    # --- what reaches it ---

    def receive(self, body: Any, reply: Callable[[Any], None]) -> None:
        match body:
            case Offer():
                self.step(self.ledger.offer(body, self._admit), reply)
                for pair in self.host.values():
                    if pair.offer.request_id == body.request_id:
                        pair.accepted_at = self.world.now
            case WhoHas():
                for pair in self.host.values():
                    if pair.offer.request_id == body.request_id:
                        pair.accepted_at = self.world.now
                self.step(self.ledger.whohas(body), reply)
            case ("verdict", Verdict() as verdict):
                self.step(self.ledger.verdicts([verdict]))
            case ("announce", Verdict() as verdict):
                with suppress(Unavailable):
                    self.step(self.ledger.announce_again(verdict), reply)
            case ("withdraw", Verdict() as verdict):
                self.step(self.ledger.withdraw(verdict), reply)

    def _admit(self, wanted: int) -> Admission:
        return Admission(max(0, min(wanted, self.room - len(self.host))))

    # --- what happens on its host ---

    def started(self, sandbox_id: str) -> None:
        if sandbox_id in self.host and self.up:
            self.host[sandbox_id].ready = True
            self.was_ready.add(sandbox_id)
            self.step(self.ledger.ready(sandbox_id))

    def start_failed(self, sandbox_id: str, *, retryable: bool) -> None:
        if self.up and sandbox_id in self.host:
            self.host.pop(sandbox_id)
            error = ErrorReply.of(Unavailable("its start failed"))
            self.step(self.ledger.failed(sandbox_id, error, retryable=retryable))

    def died(self, sandbox_id: str) -> None:
        if self.up and sandbox_id in self.host:
            self.host.pop(sandbox_id)
            self.step(self.ledger.gone(sandbox_id))

    def beat(self, *, heard: bool) -> None:
        """One heartbeat; a watcher hears it and says so, or not."""
        self.seq += 1
        self.ledger.lease.sent(self.seq)
        if not (self.connected and heard):
            return
        self.world.view[self.name] = Heartbeat(
            node=self.name, incarnation="aaaaaa", session=self.ledger.session, seq=self.seq,
            backends=("container",), policy_ready=True, max_sandboxes=100,
            running=len(self.host), load=Load(sandboxes=len(self.host) / 100),
        )  # fmt: skip
        self.ledger.lease.acked(self.ledger.session, self.seq)
