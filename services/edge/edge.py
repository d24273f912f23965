"""The parts of an edge wired to each other, and the order in which they begin their work."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, Self

from libdsec.wire.sandbox import State

from .adoption import Adoption, leave_all, promises
from .assembly import EdgeService, Ground, advertised, open_chronicle
from .exec import Execs
from .facts import Facts
from .files import Files
from .gauges import EdgeMetrics, StateCollector
from .handlers import SandboxVerbs
from .heartbeat import Heart
from .lifecycle import Lifecycle, Observer
from .many import Many
from .node import Node
from .offers import Offers
from .operators import Operators
from .pause import Pauses
from .placement import Ledger
from .policing import Policing
from .processes import Processes
from .reclaim import Reclaim
from .sandbox import Sandbox
from .serving import Verbs, serve_callers, serve_placement
from .stock import Stock
from .table import Table
from .tasks import Tasks
from .transfer import Transfers

_FINISH_S: Final = 10.0


@dataclass(frozen=True)
class Edge:
    """build -> take_over -> serve; ended by the service's stack."""

    service: EdgeService
    ground: Ground
    node: Node
    table: Table
    ledger: Ledger
    offers: Offers
    adoption: Adoption
    reclaim: Reclaim
    heart: Heart
    stock: Stock
    verbs: Verbs

    @classmethod
    def build(cls, service: EdgeService, ground: Ground, node: Node) -> Self:
        settings, clock, bus = service.settings, node.clock, service.bus
        metrics = EdgeMetrics(service.metrics.registry)
        observe = _observer(service, ground, metrics)
        table, tasks = Table(node.name, node.incarnation, node.records, clock), Tasks()
        lifecycle, pauses = Lifecycle(node, table, tasks, observe), Pauses(node, tasks, observe)
        execs, policing = Execs(node, table, pauses, tasks), Policing(node, tasks)
        share, state_dir = settings.capacity_share, ground.paths.state_dir
        facts = Facts(state_dir, clock, node.policy.health, ground.switches, share)
        ledger, stock, point = _ledger(node, ground), Stock(node), settings.point
        offers = Offers(node, bus, ledger, table, lifecycle, facts, point, tasks, stock)
        heart = Heart(
            node, bus, table, facts, point, ground.switches, ledger.lease,
            advertised(settings, ground, node),
        )  # fmt: skip
        transfers = Transfers(node, state_dir / "transfers")
        verbs = Verbs(
            offers=offers,
            sandbox=SandboxVerbs(node, table, lifecycle, pauses, policing),
            execs=execs,
            processes=Processes(node, table, pauses),
            files=Files(table, pauses, transfers),
            many=Many(node.name, table, lifecycle, pauses, clock),
            operators=Operators(node.name, ground.switches, ground.capabilities),
        )
        service.stack.push_async_callback(leave_all, table)
        service.stack.callback(transfers.close)
        service.stack.callback(stock.close)
        service.stack.push_async_callback(tasks.close, timeout_s=settings.step_timeout_s)
        service.metrics.registry.register(StateCollector(table, ledger, node.records.journal))
        adoption = Adoption(node, table, lifecycle, execs, tasks)
        reclaim = Reclaim(node, table, policing, metrics)
        return cls(service, ground, node, table, ledger, offers, adoption, reclaim, heart, stock,
                   verbs)  # fmt: skip

    async def take_over(self) -> None:
        """Adopt what lives, sweep what belongs to nobody, go on with what was accepted."""
        records = self.node.records
        self.table.recall(records.dead())
        await self.adoption.adopt(records.alive())
        lost = records.lost()
        await self.reclaim.sweep()
        for sandbox in self.table:
            self.offers.follow(sandbox)
        fates = self.adoption.fates({d.sandbox_id for d in records.dead()} | lost)
        await self.offers.resume(self.ledger.restore(promises(records.journal), fates))
        self.adoption.go_on()

    async def serve(self) -> None:
        await serve_placement(self.service, self.offers)
        await serve_callers(self.service, self.verbs)
        self.service.spawn(self.heart.run(), name="heart")
        self.service.spawn(self.offers.run(), name="ledger")
        self.service.spawn(self.reclaim.run(), name="reclaim")
        self.service.spawn(self.stock.run(), name="stock")
        self.service.on_drain(self._hand_over)
        self.service.ready_when("policy", lambda: self.node.policy.health.ready)

    async def _hand_over(self) -> None:
        """Take nothing new, finish and announce what starts, and let go of commands: they go on,
        and whoever reads them finds them again at the successor."""
        self.ground.switches.leaving = True
        starting = {s.starting for s in self.table if s.starting is not None}
        if starting:
            await asyncio.wait(starting, timeout=_FINISH_S)
        self.verbs.execs.let_go()


def _ledger(node: Node, ground: Ground) -> Ledger:
    return Ledger(
        node=node.name,
        incarnation=node.incarnation,
        session=ground.session,
        clock=node.clock.monotonic_s,
        wall_ms=lambda: round(node.clock.wall_s() * 1000),
    )


def _observer(service: EdgeService, ground: Ground, metrics: EdgeMetrics) -> Observer:
    chronicle = open_chronicle(service, ground.session)

    def observe(sandbox: Sandbox, state: State, reason: str) -> None:
        chronicle.observe(sandbox, state, reason)
        metrics.observe(sandbox, state, reason)

    return observe
