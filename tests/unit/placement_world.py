"""A world in which the placement protocol runs on an in-memory bus, one chosen event at a time.

The scheduler's and the edge's protocol are the real ones; what is simulated is what they stand on:
a bucket with compare-and-set, a queue that delivers at least once, messages that are lost,
repeated and late, processes that die between any two steps, hosts that outlive their edge, and
callers with a clock of their own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from libdsec.errors import DSecError
from libdsec.wire.defaults import HEARTBEAT_S, LEASE_S
from libdsec.wire.error import ErrorReply
from libdsec.wire.node import Heartbeat
from libdsec.wire.placement import (
    Announcement,
    CancelRequest,
    Claim,
    Held,
    Inquiry,
    PlaceRequest,
    RetryRequest,
    Verdicts,
)
from libdsec.wire.sandbox import SandboxSpec
from services.edge.placement import Announce
from services.scheduler.rulings import cancel, free, rule

from .placement_edge import Edge, Letter
from .placement_schedulers import Queued, Scheduler, Schedulers

TICK_S = 0.25
BUDGET_S = 30.0
PROJECT = "p"


@dataclass
class Caller:
    """A client's call: gives up when its budget is over, and then cancels until that is heard."""

    request: PlaceRequest
    deadline: float
    has: dict[int, str] = field(default_factory=dict)
    errors: dict[int, ErrorReply] = field(default_factory=dict)
    failed: DSecError | None = None
    cancelled: bool = False
    keeps: bool = True  # what it has when it gives up
    kept: tuple[str, ...] | None = None
    cancel_heard: bool = False

    @property
    def holds(self) -> set[str]:
        """What it goes on using."""
        if self.cancelled:
            return set(self.kept or ()) if self.keeps else set()
        return set(self.has.values())

    @property
    def answered(self) -> bool:
        count = self.request.count
        return self.failed is not None or len(self.has | dict(self.errors)) >= count


class World:
    def __init__(self, edges: int = 3, schedulers: int = 2) -> None:
        self.now = 1000.0
        self.log: list[str] = []
        self.ids = 0
        self.bucket: dict[str, tuple[Claim, int]] = {}
        self.revision = 0
        self.queue: list[Queued] = []
        self.message_ids: set[str] = set()
        self.letters: list[Letter] = []
        self.view: dict[str, Heartbeat] = {}
        self.callers: dict[str, Caller] = {}
        self.told: set[str] = set()  # sandboxes that were ever announced
        self.announcements: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.killed: set[str] = set()  # by their edge, on the protocol's behalf
        self.named: set[str] = set()  # sandboxes that a claim has named at any time
        self.schedulers = Schedulers(self, schedulers)
        self.edges = {f"n{i}": Edge(f"n{i}", self) for i in range(edges)}
        self.advance(3.0)

    def clock(self) -> float:
        return self.now

    def new_id(self, node: str) -> str:
        self.ids += 1
        alphabet = "abcdefghijkmnpqrstuvwxyz23456789"
        text = "".join(alphabet[(self.ids >> (5 * i)) & 31] for i in range(12))
        return f"{node}_aaaaaa_{text}"

    # --- callers ---

    def create(self, key: str, *, count: int = 1, image: str = "base") -> str:
        number = len(self.callers)
        request = PlaceRequest(
            request_id=f"r{number}", key=key, reply_to=f"_INBOX.p.{number}", nonce=f"n{number}",
            count=count, budget_ms=int(BUDGET_S * 1e3), spec=SandboxSpec(image=image),
        )  # fmt: skip
        self.callers[request.reply_to] = Caller(request, self.now + BUDGET_S)
        self.queue.append(Queued(PROJECT, request, self.now))
        return request.reply_to

    def ask_cancel(self, caller: Caller) -> None:
        caller.cancelled = True
        if caller.keeps and caller.kept is None:
            caller.kept = tuple(caller.has.values())
        request, keep = caller.request, (caller.kept or ()) if caller.keeps else ()
        body = CancelRequest(request_id=request.request_id, key=request.key, keep=keep)

        def heard(left: tuple[Any, ...]) -> None:
            if not left and keep == ((caller.kept or ()) if caller.keeps else ()):
                caller.cancel_heard = True

        def reply(answer: Any) -> None:
            self.letters.append(Letter(caller.request.reply_to, "schedulers", answer, heard))

        self.letters.append(Letter("schedulers", caller.request.reply_to, body, reply))

    def announced(self, edge: Edge, announce: Announce, ready: list[Any]) -> None:
        assert edge.ledger.lease.valid, "announced without the lease"
        for pair in ready:
            self.told.add(pair.sandbox_id)
            self.announcements[announce.request_id, pair.index].add(pair.sandbox_id)

    # --- time ---

    def advance(self, seconds: float, *, heard: bool = True) -> None:
        """Let time pass, with heartbeats and ticks as they fall due."""
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            if round(self.now / TICK_S) % round(HEARTBEAT_S / TICK_S) == 0:
                for edge in self.edges.values():
                    if edge.up:
                        edge.beat(heard=heard)
                for scheduler in self.schedulers.all:
                    scheduler.look()
            for edge in self.edges.values():
                if edge.up:
                    edge.sync()  # no write takes as long as a tick
                    edge.step(edge.ledger.tick())
                    edge.sync()
            self.check()

    # --- messages ---

    def deliver(self, letter: Letter, *, which: int = 0) -> None:
        """Hand a letter over; to an edge that is down or cut off it is lost."""
        if letter.sender in self.edges and not self.edges[letter.sender].connected:
            return
        if letter.to in self.edges:
            edge = self.edges[letter.to]
            if not edge.up or not edge.connected:
                return
            if letter.sender == "schedulers":
                assert letter.reply is not None
                letter.reply(letter.body)
            else:
                edge.receive(letter.body, letter.reply or _nobody)
        elif letter.to == "schedulers":
            self._ask_scheduler(letter, self.schedulers.all[which % len(self.schedulers.all)])
        elif letter.to in self.callers:
            self._to_caller(letter)
        elif letter.reply is not None:
            letter.reply(letter.body)  # to a waiting task

    def _ask_scheduler(self, letter: Letter, scheduler: Scheduler) -> None:
        reply = letter.reply or _nobody

        def finish(answer: Any) -> None:
            if not isinstance(answer, Exception):
                reply(answer)

        match letter.body:
            case Inquiry(held=held):
                self.schedulers.run(scheduler, _rule_all(held), finish)
            case RetryRequest() as retry:
                self.schedulers.run(scheduler, free(retry), finish)
            case CancelRequest() as request:
                self.schedulers.run(scheduler, cancel(PROJECT, request), finish)

    def _to_caller(self, letter: Letter) -> None:
        caller = self.callers[letter.to]
        match letter.body:
            case _ if letter.reply is not None:
                letter.reply(letter.body)
            case (str(), dict() as ready, dict() as failed):
                for index, sandbox_id in ready.items():
                    caller.has.setdefault(index, sandbox_id)
                self._fail(caller, failed)
            case Announcement(failed=failed):
                self._fail(caller, failed)
            case DSecError() as error:
                caller.failed = error

    def _fail(self, caller: Caller, failed: dict[int, ErrorReply]) -> None:
        for index, error in failed.items():
            if index not in caller.has:
                caller.errors[index] = error

    # --- what must hold at every moment ---

    def check(self) -> None:
        for (request_id, index), ids in self.announcements.items():
            assert len(ids) <= 1, f"item {index} of {request_id} was announced as {sorted(ids)}"
        for edge in self.edges.values():
            if not edge.up:
                continue
            for sandbox in edge.host.values():
                if sandbox.sandbox_id not in self.named:
                    age_s = self.now - max(sandbox.accepted_at, edge.up_at)
                    assert age_s <= LEASE_S + 2 * TICK_S + 0.01, f"{sandbox} outlived its lease"

    # --- a world in which everything works ---

    def heal(self) -> None:
        for edge in self.edges.values():
            edge.connected = True
            if not edge.up:
                edge.start()

    def fair(self, seconds: float) -> None:
        """Everything that can happen happens, in order, for so long."""
        until = self.now + seconds
        while self.now < until:
            for _ in range(200):
                if not self._happen():
                    break
            self.advance(TICK_S)
            for caller in self.callers.values():
                over = self.now >= caller.deadline and not caller.answered
                if (over or caller.cancelled) and not caller.cancel_heard:
                    self.ask_cancel(caller)

    def _happen(self) -> bool:
        letters, self.letters = self.letters, []
        for number, letter in enumerate(letters):
            self.deliver(letter, which=number)
        for edge in self.edges.values():
            edge.sync()
            for sandbox in list(edge.host.values()):
                if not sandbox.ready:
                    edge.started(sandbox.sandbox_id)
        waiting = [q for q in self.queue if not q.gone and q.visible_at <= self.now]
        for number in range(len(waiting)):
            self.schedulers.deliver_request(0, number)
        moved = False
        for task in list(self.schedulers.tasks):
            if not task.over:
                was = task.deadline
                self.schedulers.step(task)
                moved = moved or task.over or was is None or task.deadline is None
        return bool(letters or waiting or moved)


def _rule_all(held: tuple[Held, ...]) -> Any:
    verdicts = []
    for one in held:
        verdicts.append((yield from rule(one)))
    return Verdicts(verdicts=tuple(verdicts))


def _nobody(answer: Any) -> None:
    """For messages that nobody answers."""
