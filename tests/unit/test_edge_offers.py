"""The driver of the placement ledger: the order of journal, effects and replies, and what a full
journal or a lost bus may and may not stop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libdsec.errors import DSecError, Internal, NoCapacity, Unavailable
from libdsec.wire.layer import LayerInfo, LayerKind, ResolvedLayers
from libdsec.wire.placement import Announcement, Offer, OfferReply, Verdict, WhoHas
from libdsec.wire.sandbox import Qos, Resources, SandboxSpec, State
from services.chassis.clock import Clock
from services.edge.admission import NodeFacts, OperatingPoint
from services.edge.clocks import Clocks
from services.edge.fault import faults
from services.edge.journal import Journal, JournalFullError
from services.edge.offers import Offers
from services.edge.placement import PREFIX, Ledger
from services.edge.record import Origin, Records, Status
from services.edge.sandbox import Sandbox
from services.edge.table import Table
from services.edge.tasks import Tasks

BASE = LayerInfo(
    space="p", name="b", version="1", digest="d", kind=LayerKind.BASE, size_bytes=1, files=1,
    created_at=0.0,
)  # fmt: skip


@dataclass
class Played:
    """The bus, the lifecycle and the facts, as far as Offers uses them."""

    table: Table
    log: list[str] = field(default_factory=list)
    announced: list[Announcement] = field(default_factory=list)
    bus_error: DSecError | None = None
    start_error: Exception | None = None
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    cores: float = 4.0

    def __post_init__(self) -> None:
        self.hold.set()

    async def send(self, reply_to: str, kind: str, message: Announcement, **_: Any) -> None:
        if self.bus_error is not None:
            raise self.bus_error
        self.log.append("announce")
        self.announced.append(message)

    def accept(self, origin: Origin) -> Sandbox:
        spec = origin.spec
        sandbox = Sandbox(origin, Status(), cast("Any", None), Clocks(spec.lifetime, 0))
        self.table.add(sandbox)
        return sandbox

    async def create(self, sandbox: Sandbox, layers: object, phases: object) -> None:
        self.log.append("create")
        await self.hold.wait()
        if self.start_error is not None:
            self.table.drop(sandbox.id)
            raise self.start_error
        sandbox.status = Status(state=State.READY)
        sandbox.journaled = True

    def read(self, sandboxes: Table) -> NodeFacts:
        alive = tuple(sandboxes)
        return NodeFacts(
            available_memory_mib=10**5, memory_pressure=0, free_disk_mib=10**6, free_pids=10**5,
            cores=self.cores, sandboxes=len(alive), creating=0, creating_memory_mib=0,
            committed_ls_cpus=sum(s.committed_ls_cpus for s in alive), policy_ready=True,
        )  # fmt: skip


@dataclass
class World:
    offers: Offers
    ledger: Ledger
    journal: Journal
    played: Played
    tasks: Tasks

    def offer(self, count: int = 1, **spec: Any) -> Offer:
        number = next(_NUMBERS)
        return Offer(
            request_id=f"r{number}", project="p", key=f"k{number}", epoch=1, session="s",
            items=tuple(range(count)), count=count, reply_to="_INBOX.p.x", nonce="n",
            budget_ms=60_000, spec=SandboxSpec(image="b@1", **spec),
            layers=ResolvedLayers(base=BASE),
        )  # fmt: skip

    async def ask(self, offer: Offer) -> OfferReply:
        return await self.offers.offer(offer, cast("Any", None))

    async def confirm(self, offer: Offer, reply: OfferReply) -> None:
        verdict = Verdict(
            request_id=offer.request_id, project="p", epoch=1, confirmed=reply.accepted
        )
        await self.offers.verdict(verdict, cast("Any", None))

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0.002)


_NUMBERS = itertools.count()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    journal, clock, tasks = Journal.open(tmp_path), Clock(), Tasks()
    records = Records(journal)
    table = Table("n1", "aaaaaa", records, clock)
    ledger = Ledger(
        node="n1", incarnation="aaaaaa", session="s", clock=clock.monotonic_s,
        wall_ms=lambda: round(clock.wall_s() * 1000),
    )  # fmt: skip
    ledger.lease.sent(1)
    ledger.lease.acked("s", 1)
    played = Played(table)
    node = SimpleNamespace(name="n1", records=records, clock=clock, fault=faults(""))
    stock = SimpleNamespace(wanted=lambda resources: None)
    offers = Offers(
        cast("Any", node), cast("Any", played), ledger, table, cast("Any", played),
        cast("Any", played), OperatingPoint(), tasks, cast("Any", stock),
    )  # fmt: skip
    yield World(offers, ledger, journal, played, tasks)
    played.hold.set()
    await tasks.close(timeout_s=1)
    journal.close()


async def test_an_acceptance_is_on_disk_before_anything_follows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = world.journal.sync

    async def recording() -> None:
        await real()
        world.played.log.append("sync")

    monkeypatch.setattr(world.journal, "sync", recording)
    reply = await world.ask(world.offer(2))
    assert world.played.log == ["sync"]  # the starts are tasks that have not run yet
    assert len(reply.accepted) == 2
    assert len(world.journal.items(PREFIX)) == 2
    await world.settle()
    assert world.played.log.count("create") == 2


async def test_only_what_the_claim_names_is_announced(world: World) -> None:
    offer = world.offer()
    reply = await world.ask(offer)
    await world.settle()
    assert world.played.announced == []
    await world.confirm(offer, reply)
    (told,) = world.played.announced
    assert [item.sandbox_id for item in told.ready] == [reply.accepted[0].sandbox_id]


async def test_offers_that_arrive_together_are_not_both_given_the_last_room(world: World) -> None:
    offers = [
        world.offer(qos=Qos.LATENCY_SENSITIVE, resources=Resources(cpus=3.0)) for _ in range(3)
    ]
    replies = await asyncio.gather(*map(world.ask, offers))
    assert sorted(len(reply.accepted) for reply in replies) == [0, 0, 1]
    refused = [r.refused.exception() for r in replies if r.refused is not None]
    assert all(isinstance(err, NoCapacity) for err in refused)


async def test_a_journal_without_room_refuses_and_forgets(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = world.offer()
    with monkeypatch.context() as patched:
        patched.setattr(world.journal, "put", full)
        with pytest.raises(Unavailable, match="promise"):
            await world.ask(offer)
        ask = WhoHas(request_id="other", project="p", epoch=1)
        with pytest.raises(Unavailable, match="promise"):
            await world.offers.whohas(ask, cast("Any", None))
    assert len(world.played.table) == 0
    assert world.ledger.unannounced == 0
    assert len((await world.ask(offer)).accepted) == 1


async def test_a_full_journal_does_not_stop_an_announcement(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = world.offer()
    reply = await world.ask(offer)
    await world.settle()
    monkeypatch.setattr(world.journal, "put", full)
    await world.confirm(offer, reply)
    assert len(world.played.announced) == 1


async def test_what_the_bus_did_not_take_is_announced_later(world: World) -> None:
    offer = world.offer()
    reply = await world.ask(offer)
    await world.settle()
    world.played.bus_error = Unavailable("away")
    await world.confirm(offer, reply)
    assert world.played.announced == []
    world.played.bus_error = None
    running = asyncio.create_task(world.offers.run())
    async with asyncio.timeout(3):
        while not world.played.announced:
            await asyncio.sleep(0.01)
    running.cancel()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Unavailable("no disk"), Unavailable),
        (RuntimeError("a bug"), Internal),
        (JournalFullError("x"), NoCapacity),
    ],
)
async def test_a_failed_start_is_told_with_its_reason_unless_it_is_placed_again(
    world: World, error: Exception, kind: type[DSecError]
) -> None:
    world.played.start_error = error
    offer = world.offer()
    reply = await world.ask(offer)
    await world.settle()
    await world.confirm(offer, reply)
    await world.settle()
    if kind.retryable:
        assert world.played.announced == []  # a scheduler is asked to place it again
    else:
        (told,) = world.played.announced
        assert isinstance(told.failed[0].exception(), kind)


def full(key: str, value: bytes) -> None:
    raise JournalFullError("no space left")
