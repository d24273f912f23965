"""A world in which the placement protocol runs on an in-memory bus, one chosen event at a time.

The scheduler's and the edge's protocol are the real ones; what is simulated is what they stand on:
a bucket with compare-and-set, a queue that delivers at least once, messages that are lost,
repeated and late, processes that die between any two steps, hosts that outlive their edge, and
callers with a clock of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from libdsec.errors import DSecError, Unavailable
from libdsec.wire.defaults import HEARTBEAT_S, LEASE_S
from libdsec.wire.error import ErrorReply
from libdsec.wire.layer import LayerInfo, LayerKind, ResolvedLayers
from libdsec.wire.model import Message
from libdsec.wire.node import Heartbeat, Load
from libdsec.wire.placement import (
    Announcement,
    CancelRequest,
    Claim,
    Held,
    Holding,
    Inquiry,
    Offer,
    OfferReply,
    PlaceRequest,
    RetryRequest,
    Verdict,
    Verdicts,
    WhoHas,
)
from libdsec.wire.sandbox import SandboxSpec
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
from services.scheduler import effects as e
from services.scheduler.attempt import Job
from services.scheduler.claims import digest_of
from services.scheduler.cluster import ClusterState
from services.scheduler.nodes import NodeTable
from services.scheduler.protocol import place
from services.scheduler.rulings import cancel, free, rule

ACK_WAIT_S = 15.0
TICK_S = 0.25
BUDGET_S = 30.0
PROJECT = "p"

BASE = LayerInfo(
    space="public", name="base", version="1", digest="d", kind=LayerKind.BASE, size_bytes=1,
    files=1, created_at=0.0,
)  # fmt: skip


@dataclass
class Letter:
    """A message on its way. `to` is an edge's name, "schedulers", or the id of a caller."""

    to: str
    sender: str
    body: Any
    reply: Callable[[Any], None] | None = None


@dataclass
class Queued:
    project: str
    request: PlaceRequest
    published_at: float
    deliveries: int = 0
    visible_at: float = 0.0
    gone: bool = False


@dataclass
class Task:
    """A protocol generator that a scheduler is driving, and the effect it waits for."""

    owner: Scheduler
    steps: Any
    finish: Callable[[Any], None]
    waiting: e.Effect[Any] | None = None
    answers: dict[str, Any] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()
    deadline: float | None = None  # set while messages of the effect are out
    over: bool = False


class Scheduler:
    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.world = world
        self.table = NodeTable(world.clock)
        self.cluster = ClusterState(clock=world.clock, rng=Random(len(world.log)))

    def look(self) -> None:
        self.table.observe(self.world.view.values())
        self.cluster.show(self.table.views())


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
        if step.records:
            self.todo.append((step, reply))
        elif self.todo and (step.effects or reply):
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
                    self.send("schedulers", request, lambda _, r=request: self._retried(r))
        if reply is not None:
            reply(step.reply)

    def _verdicts(self, reply: Verdicts) -> None:
        self.step(self.ledger.verdicts(reply.verdicts))

    def _retried(self, request: RetryRequest) -> None:
        self.step(self.ledger.retried(request.project, request.items))

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


@dataclass
class Caller:
    """A client's call: gives up when its budget is over, and then cancels until that is heard."""

    request: PlaceRequest
    deadline: float
    has: dict[int, str] = field(default_factory=dict)
    errors: dict[int, ErrorReply] = field(default_factory=dict)
    failed: DSecError | None = None
    cancelled: bool = False
    cancel_heard: bool = False

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
        self.tasks: list[Task] = []
        self.view: dict[str, Heartbeat] = {}
        self.callers: dict[str, Caller] = {}
        self.told: set[str] = set()  # sandboxes that were ever announced
        self.announcements: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.killed: set[str] = set()  # by their edge, on the protocol's behalf
        self.named: set[str] = set()  # sandboxes that a claim has named at any time
        self.schedulers = [Scheduler(f"sched{i}", self) for i in range(schedulers)]
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
        body = CancelRequest(request_id=caller.request.request_id, key=caller.request.key)

        def heard(left: tuple[Any, ...]) -> None:
            caller.cancel_heard = caller.cancel_heard or not left

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
                for scheduler in self.schedulers:
                    scheduler.look()
            for edge in self.edges.values():
                if edge.up:
                    edge.sync()  # no write takes as long as a tick
                    edge.step(edge.ledger.tick())
                    edge.sync()
            self.check()

    # --- schedulers ---

    def deliver_request(self, pick: int, which: int) -> None:
        ready = [q for q in self.queue if not q.gone and q.visible_at <= self.now]
        if not ready:
            return
        queued = ready[pick % len(ready)]
        if self.now >= queued.published_at + queued.request.budget_ms / 1e3:
            queued.gone = True  # the queue forgets it (Nats-TTL), and tells nobody
            return
        scheduler = self.schedulers[which % len(self.schedulers)]
        queued.deliveries += 1
        queued.visible_at = self.now + ACK_WAIT_S
        deadline = queued.published_at + queued.request.budget_ms / 1e3
        job = Job(
            queued.project, queued.request, digest_of(queued.request), queued.deliveries, deadline
        )

        def finish(outcome: Any) -> None:
            if isinstance(outcome, e.Done):
                queued.gone = True
            else:
                delay = outcome.delay_s if isinstance(outcome, e.Park) else 1.0
                queued.visible_at = min(queued.visible_at, self.now + delay)

        self.run(scheduler, place(job, scheduler.cluster), finish)

    def run(self, scheduler: Scheduler, steps: Any, finish: Callable[[Any], None]) -> None:
        task = Task(scheduler, steps, finish)
        self.tasks.append(task)
        self.resume(task, None)

    def resume(self, task: Task, result: Any) -> None:
        task.deadline, task.answers, task.expected = None, {}, frozenset()
        try:
            if isinstance(result, Exception):
                task.waiting = task.steps.throw(result)
            else:
                task.waiting = task.steps.send(result)
        except StopIteration as stop:
            self.end(task)
            task.finish(stop.value)
        except Unavailable as err:
            self.end(task)
            task.finish(err)

    def end(self, task: Task) -> None:
        task.over = True
        self.tasks.remove(task)

    def step_task(self, task: Task, fate: str = "ok") -> None:
        """Carry out the effect a task waits for. `fate`: ok, lost (not carried out, the scheduler
        learns nothing), unknown (carried out, the scheduler learns nothing)."""
        effect = task.waiting
        assert effect is not None
        if task.deadline is not None:
            if self.now >= task.deadline or task.expected <= set(task.answers):
                self.resume(task, self._collected(task, effect))
            return
        if fate == "lost" and isinstance(effect, e.ReadClaim | e.WriteClaim | e.Republish):
            self.resume(task, Unavailable("the bus is away"))
            return
        result = self._do(task, effect)
        if task.deadline is not None:
            return
        if fate == "unknown" and isinstance(effect, e.WriteClaim | e.Republish):
            result = Unavailable("the bus went away")
        self.resume(task, result)

    def _do(self, task: Task, effect: e.Effect[Any]) -> Any:
        match effect:
            case e.ReadClaim(key):
                found = self.bucket.get(key)
                return e.Stored(*found) if found else None
            case e.WriteClaim(key, claim, revision):
                return self._write(key, claim, revision)
            case e.ResolveLayers(_, spec, _):
                return ResolvedLayers(base=BASE)
            case e.ChoosePools():
                return frozenset({"local"})
            case e.Tell(node, verdict):
                self.letters.append(Letter(node, task.owner.name, ("verdict", verdict), _nobody))
            case e.Answer(request, message):
                self.letters.append(Letter(request.reply_to, task.owner.name, message))
            case e.Republish(project, request, message_id):
                if message_id not in self.message_ids:
                    self.message_ids.add(message_id)
                    self.queue.append(Queued(project, request, self.now))
            case e.MakeOffers(offers, timeout_s):
                self._scatter(task, dict(offers), timeout_s)
            case e.AskWhoHas(ask, expect, timeout_s):
                self._scatter(task, dict.fromkeys(self.edges, ask), timeout_s, expect)
            case e.AnnounceAgain(verdicts, timeout_s):
                self._scatter(task, {n: ("announce", v) for n, v in verdicts.items()}, timeout_s)
            case e.Withdraw(verdicts, timeout_s):
                self._scatter(task, {n: ("withdraw", v) for n, v in verdicts.items()}, timeout_s)
        return None

    def _write(self, key: str, claim: Claim, revision: int) -> int | None:
        if (self.bucket[key][1] if key in self.bucket else 0) != revision:
            return None
        self.revision += 1
        self.bucket[key] = (claim, self.revision)
        self.named |= {item.sandbox_id for item in claim.items}
        return self.revision

    def _scatter(
        self, task: Task, bodies: dict[str, Any], timeout_s: float, expect: Any = None
    ) -> None:
        task.deadline = self.now + timeout_s
        task.expected = frozenset(bodies) if expect is None else frozenset(expect)
        current = task.waiting

        def reply_from(node: str) -> Callable[[Any], None]:
            def reply(answer: Any) -> None:
                def arrive(got: Any) -> None:
                    if not task.over and task.waiting is current:
                        task.answers[node] = got

                self.letters.append(Letter(task.owner.name, node, answer, arrive))

            return reply

        for node, body in bodies.items():
            self.letters.append(Letter(node, task.owner.name, body, reply_from(node)))

    def _collected(self, task: Task, effect: e.Effect[Any]) -> Any:
        match effect:
            case e.MakeOffers(offers, _):
                assert all(isinstance(a, OfferReply) for a in task.answers.values())
                return {node: task.answers.get(node) for node in offers}
            case e.AskWhoHas():
                return tuple(a for a in task.answers.values() if isinstance(a, Holding))
            case _:
                return frozenset(task.answers)

    def crash_scheduler(self, which: int) -> None:
        index = which % len(self.schedulers)
        dead = self.schedulers[index]
        for task in [t for t in self.tasks if t.owner is dead]:
            self.end(task)
        self.schedulers[index] = Scheduler(dead.name, self)

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
            self._ask_scheduler(letter, self.schedulers[which % len(self.schedulers)])
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
                self.run(scheduler, _rule_all(held), finish)
            case RetryRequest() as retry:
                self.run(scheduler, free(retry), lambda a: finish(a or ()))
            case CancelRequest() as request:
                self.run(scheduler, cancel(PROJECT, request), finish)

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
            self.deliver_request(0, number)
        moved = False
        for task in list(self.tasks):
            if not task.over:
                was = task.deadline
                self.step_task(task)
                moved = moved or task.over or was is None or task.deadline is None
        return bool(letters or waiting or moved)


def _rule_all(held: tuple[Held, ...]) -> Any:
    verdicts = []
    for one in held:
        verdicts.append((yield from rule(one)))
    return Verdicts(verdicts=tuple(verdicts))


def _nobody(answer: Any) -> None:
    """For messages that nobody answers."""
