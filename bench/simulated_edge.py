"""An edge without a host: the real ledger of placements, over the real bus, with made-up sandboxes.

Everything a scheduler can see of an edge is the real thing: what is accepted, promised, announced
and let go. What is made up is what stands below it: a sandbox is an entry in a table that becomes
ready after `start_s`, and the journal is a dict.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from libdsec.bus import Bus, Call
from libdsec.errors import DSecError, SandboxDead
from libdsec.wire import subjects
from libdsec.wire.error import ErrorReply
from libdsec.wire.ids import new_incarnation, random_name
from libdsec.wire.model import Empty
from libdsec.wire.node import Heartbeat, HeartbeatAck, Load
from libdsec.wire.placement import (
    Announcement,
    Holding,
    Offer,
    OfferReply,
    ReadyItem,
    Verdict,
    WhoHas,
)
from services.edge.placement import (
    Admission,
    Announce,
    AskRetry,
    Effect,
    Fate,
    Inquire,
    Kill,
    Ledger,
    Start,
    Step,
)

R = TypeVar("R")


class SimulatedEdge:
    """start → (crash → restart)* → stop. `bus` must have the node's name as its identity."""

    def __init__(
        self,
        bus: Bus,
        node: str,
        *,
        start_s: float = 0.0,
        room: int = 100_000,
        heartbeat_s: float = 1.0,
        capabilities: tuple[str, ...] = (),
        memory_mib: int = 64_000,
        pool: str = "local",
    ) -> None:
        self.bus = bus
        self.node = node
        self.room = room
        self.start_s = start_s
        self.capabilities = capabilities
        self.memory_mib = memory_mib
        self.pool = pool
        self.journal: dict[str, bytes] = {}
        self.ready: dict[str, float] = {}  # sandbox id → when; outlives a crash
        self.starting: set[str] = set()
        self.failing = 0  # so many of the next starts fail, retryably
        self.announced: list[tuple[str, int, str]] = []  # request, index, sandbox id
        self.offers: list[Offer] = []
        self.keep_offers = False
        self._heartbeat_s = heartbeat_s
        self._incarnation = new_incarnation()
        self._seq = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._servings: list[Any] = []

    async def start(self) -> None:
        self.ledger = Ledger(
            node=self.node,
            incarnation=self._incarnation,
            session=random_name(8),
            clock=time.monotonic,
            wall_ms=lambda: int(time.time() * 1e3),
        )
        serve, subscribe = self.bus.serve, self.bus.subscribe
        fates = dict.fromkeys(self.ready, Fate.RUNNING)
        await self._drive(self.ledger.restore(list(self.journal.items()), fates))
        to = {"node": self.node}
        self._servings = [
            await serve(subjects.OFFER, self._offer, concurrency=512, **to),  # type: ignore[arg-type]
            await serve(subjects.WHOHAS, self._whohas),
            await serve(subjects.ANNOUNCE, self._announce_again, **to),  # type: ignore[arg-type]
            await serve(subjects.WITHDRAW, self._withdraw, **to),  # type: ignore[arg-type]
            await subscribe(subjects.VERDICT, self._verdict, concurrency=512, **to),  # type: ignore[arg-type]
            await subscribe(subjects.HEARTBEAT_ACK, self._acked, **to),  # type: ignore[arg-type]
        ]
        self._spawn(self._beat())
        self._spawn(self._tick())

    async def crash(self) -> None:
        """The process is gone; its sandboxes and what is journaled are not."""
        for serving in self._servings:
            await serving.stop(timeout_s=0.0)
        for task in tuple(self._tasks):
            task.cancel()
        self.starting.clear()

    @property
    def sandboxes(self) -> set[str]:
        return self.starting | set(self.ready)

    # --- what a driver of the ledger does ---

    def put(self, key: str, value: bytes) -> None:
        self.journal[key] = value

    def drop(self, key: str) -> None:
        self.journal.pop(key, None)

    async def _drive(self, step: Step[R]) -> R:
        for record in step.records:
            record.apply(self)
        for effect in step.effects:
            await self._carry_out(effect)
        return step.reply

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Start(sandbox_id, _, _):
                self.starting.add(sandbox_id)
                self._spawn(self._start(sandbox_id))
            case Kill(sandbox_id, _):
                self.starting.discard(sandbox_id)
                self.ready.pop(sandbox_id, None)
            case Announce():
                await self._announce(effect)
            case Inquire():
                self._spawn(self._inquire(effect))
            case AskRetry():
                self._spawn(self._ask_retry(effect))

    async def _start(self, sandbox_id: str) -> None:
        if self.start_s:
            await asyncio.sleep(self.start_s)
        if sandbox_id not in self.starting:
            return
        self.starting.discard(sandbox_id)
        if self.failing > 0:
            self.failing -= 1
            error = ErrorReply(code="unavailable", message="its start failed, as it was told to")
            await self._drive(self.ledger.failed(sandbox_id, error, retryable=True))
            return
        self.ready[sandbox_id] = time.time()
        await self._drive(self.ledger.ready(sandbox_id))

    async def _announce(self, effect: Announce) -> None:
        ready, failed = [], dict(effect.failed)
        for item in effect.ready:
            at = self.ready.get(item.sandbox_id)
            if at is None:
                failed[item.index] = ErrorReply.of(SandboxDead(f"{item.sandbox_id} is gone"))
                continue
            ready.append(
                ReadyItem(
                    index=item.index, sandbox_id=item.sandbox_id, node=self.node, created_at=at
                )
            )
            self.announced.append((effect.request_id, item.index, item.sandbox_id))
        message = Announcement(
            request_id=effect.request_id, node=self.node, ready=tuple(ready), failed=failed
        )
        try:
            await self.bus.send(
                effect.reply_to, "announce", message, nonce=effect.nonce, wait_s=0.0
            )
        except DSecError:
            self.ledger.announce_failed(effect)

    async def _inquire(self, effect: Inquire) -> None:
        try:
            answer = await self.bus.request(
                subjects.INQUIRE, effect.inquiry, node=self.node, budget_s=2.0
            )
        except DSecError:
            return
        await self._drive(self.ledger.verdicts(answer.verdicts))

    async def _ask_retry(self, effect: AskRetry) -> None:
        request = effect.request
        try:
            reply = await self.bus.request(subjects.RETRY, request, node=self.node, budget_s=2.0)
        except DSecError:
            return
        await self._drive(self.ledger.retried(request.project, request.items, reply.again))

    # --- from the bus ---

    async def _offer(self, offer: Offer, _call: Call) -> OfferReply:
        if self.keep_offers:
            self.offers.append(offer)
        step = self.ledger.offer(offer, self._admit)
        return await self._drive(step)

    async def _whohas(self, ask: WhoHas, _call: Call) -> Holding:
        return await self._drive(self.ledger.whohas(ask))

    async def _verdict(self, verdict: Verdict, _call: Call) -> None:
        await self._drive(self.ledger.verdicts([verdict]))

    async def _announce_again(self, verdict: Verdict, _call: Call) -> Empty:
        await self._drive(self.ledger.announce_again(verdict))
        return Empty()

    async def _withdraw(self, verdict: Verdict, _call: Call) -> Empty:
        await self._drive(self.ledger.withdraw(verdict))
        return Empty()

    async def _acked(self, ack: HeartbeatAck, _call: Call) -> None:
        self.ledger.lease.acked(ack.session, ack.seq)

    def _admit(self, wanted: int) -> Admission:
        return Admission(max(0, min(wanted, self.room - len(self.sandboxes))))

    async def _beat(self) -> None:
        while True:
            self._seq += 1
            self.ledger.lease.sent(self._seq)
            share = len(self.sandboxes) / max(1, self.room)
            beat = Heartbeat(
                node=self.node,
                incarnation=self._incarnation,
                session=self.ledger.session,
                seq=self._seq,
                backends=("container",),
                capabilities=self.capabilities,
                pool=self.pool,
                policy_ready=True,
                running=len(self.sandboxes),
                max_sandboxes=self.room,
                memory_mib=self.memory_mib,
                cpus=64,
                disk_mib=1 << 20,
                load=Load(sandboxes=round(share, 4)),
            )
            with suppress(DSecError):  # the bus is away: the next one says what is true then
                await self.bus.publish(subjects.HEARTBEAT, beat, node=self.node)
            await asyncio.sleep(self._heartbeat_s)

    async def _tick(self) -> None:
        while True:
            await self._drive(self.ledger.tick())
            await asyncio.sleep(0.25)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
