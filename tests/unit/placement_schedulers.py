"""Schedulers in the simulated world: the real protocol's steps, one effect at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from libdsec.errors import Unavailable
from libdsec.wire.layer import LayerInfo, LayerKind, ResolvedLayers
from libdsec.wire.placement import Claim, Holding, OfferReply, PlaceRequest
from services.scheduler import effects as e
from services.scheduler.attempt import Job
from services.scheduler.claims import digest_of
from services.scheduler.cluster import ClusterState
from services.scheduler.nodes import NodeTable
from services.scheduler.protocol import place

from .placement_edge import Letter

if TYPE_CHECKING:
    from .placement_world import World

ACK_WAIT_S = 15.0

BASE = LayerInfo(
    space="public", name="base", version="1", digest="d", kind=LayerKind.BASE, size_bytes=1,
    files=1, created_at=0.0,
)  # fmt: skip


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


class Schedulers:
    """All of them, the tasks they have in hand, and what becomes of each effect."""

    def __init__(self, world: World, count: int) -> None:
        self.world = world
        self.tasks: list[Task] = []
        self.all = [Scheduler(f"sched{i}", world) for i in range(count)]

    def deliver_request(self, pick: int, which: int) -> None:
        ready = [q for q in self.world.queue if not q.gone and q.visible_at <= self.world.now]
        if not ready:
            return
        queued = ready[pick % len(ready)]
        if self.world.now >= queued.published_at + queued.request.budget_ms / 1e3:
            queued.gone = True  # the queue forgets it (Nats-TTL), and tells nobody
            return
        scheduler = self.all[which % len(self.all)]
        queued.deliveries += 1
        queued.visible_at = self.world.now + ACK_WAIT_S
        deadline = queued.published_at + queued.request.budget_ms / 1e3
        job = Job(
            queued.project, queued.request, digest_of(queued.request), queued.deliveries, deadline
        )

        def finish(outcome: Any) -> None:
            if isinstance(outcome, e.Done):
                queued.gone = True
            else:
                delay = outcome.delay_s if isinstance(outcome, e.Park) else 1.0
                queued.visible_at = min(queued.visible_at, self.world.now + delay)

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

    def step(self, task: Task, fate: str = "ok") -> None:
        """Carry out the effect a task waits for. `fate`: ok, lost (not carried out, the scheduler
        learns nothing), unknown (carried out, the scheduler learns nothing)."""
        effect = task.waiting
        assert effect is not None
        if task.deadline is not None:
            if self.world.now >= task.deadline or task.expected <= set(task.answers):
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
                found = self.world.bucket.get(key)
                return e.Stored(*found) if found else None
            case e.WriteClaim(key, claim, revision):
                return self._write(key, claim, revision)
            case e.ResolveLayers():
                return ResolvedLayers(base=BASE)
            case e.ChoosePools():
                return frozenset({"local"})
            case e.Tell(node, verdict):
                self.world.letters.append(Letter(node, task.owner.name, ("verdict", verdict)))
            case e.Answer(request, message):
                self.world.letters.append(Letter(request.reply_to, task.owner.name, message))
            case e.Republish(project, request, message_id):
                if message_id not in self.world.message_ids:
                    self.world.message_ids.add(message_id)
                    self.world.queue.append(Queued(project, request, self.world.now))
            case e.MakeOffers(offers, timeout_s):
                self._scatter(task, dict(offers), timeout_s)
            case e.AskWhoHas(ask, expect, timeout_s):
                self._scatter(task, dict.fromkeys(self.world.edges, ask), timeout_s, expect)
            case e.AnnounceAgain(verdicts, timeout_s):
                self._scatter(task, {n: ("announce", v) for n, v in verdicts.items()}, timeout_s)
            case e.Withdraw(verdicts, timeout_s):
                self._scatter(task, {n: ("withdraw", v) for n, v in verdicts.items()}, timeout_s)
        return None

    def _write(self, key: str, claim: Claim, revision: int) -> int | None:
        if (self.world.bucket[key][1] if key in self.world.bucket else 0) != revision:
            return None
        self.world.revision += 1
        self.world.bucket[key] = (claim, self.world.revision)
        self.world.named |= {item.sandbox_id for item in claim.items}
        return self.world.revision

    def _scatter(
        self, task: Task, bodies: dict[str, Any], timeout_s: float, expect: Any = None
    ) -> None:
        task.deadline = self.world.now + timeout_s
        task.expected = frozenset(bodies) if expect is None else frozenset(expect)
        current = task.waiting

        def reply_from(node: str) -> Callable[[Any], None]:
            def reply(answer: Any) -> None:
                def arrive(got: Any) -> None:
                    if not task.over and task.waiting is current:
                        task.answers[node] = got

                self.world.letters.append(Letter(task.owner.name, node, answer, arrive))

            return reply

        for node, body in bodies.items():
            self.world.letters.append(Letter(node, task.owner.name, body, reply_from(node)))

    def _collected(self, task: Task, effect: e.Effect[Any]) -> Any:
        match effect:
            case e.MakeOffers(offers, _):
                assert all(isinstance(a, OfferReply) for a in task.answers.values())
                return {node: task.answers.get(node) for node in offers}
            case e.AskWhoHas():
                return tuple(a for a in task.answers.values() if isinstance(a, Holding))
            case _:
                return frozenset(task.answers)

    def crash(self, which: int) -> None:
        index = which % len(self.all)
        dead = self.all[index]
        for task in [t for t in self.tasks if t.owner is dead]:
            self.end(task)
        self.all[index] = Scheduler(dead.name, self.world)
