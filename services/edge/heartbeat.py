"""Once a second the node says how it is; a watcher's acknowledgement is its right to announce.

Each term of the load is a share of the operating point, averaged exponentially, so that one slow
second moves no placement and a burst of creates shows at once in `creating`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import structlog

from libdsec.bus import Bus
from libdsec.errors import DSecError
from libdsec.wire import subjects
from libdsec.wire.defaults import HEARTBEAT_S
from libdsec.wire.node import Heartbeat, Load
from libdsec.wire.sandbox import State

from .admission import NodeFacts, OperatingPoint
from .facts import Facts, Measured
from .node import Node
from .placement import AnnounceLease
from .switches import Switches
from .table import Table

_log = structlog.get_logger("edge.heartbeat")

_SMOOTHING: Final = 0.3  # of the newest second
MAX_BYTES: Final = 1024


def load_now(facts: NodeFacts, point: OperatingPoint, total_memory_mib: int) -> Load:
    """How much of the operating point is used; 1.0 is full. Pure."""
    usable_mib = max(1, total_memory_mib - point.memory_reserve_mib)
    used_mib = total_memory_mib - facts.available_memory_mib
    return Load(
        memory=used_mib / usable_mib,
        ls_cpu=facts.committed_ls_cpus / max(1e-9, facts.cores * point.ls_cpu_share),
        creating=facts.creating / max(1, point.max_creating),
        sandboxes=facts.sandboxes / max(1, point.max_sandboxes),
    )


def smoothed(before: Load | None, now: Load) -> Load:
    if before is None:
        return _rounded(now)
    return _rounded(
        Load(
            memory=_mix(before.memory, now.memory),
            ls_cpu=_mix(before.ls_cpu, now.ls_cpu),
            creating=max(now.creating, _mix(before.creating, now.creating)),
            sandboxes=_mix(before.sandboxes, now.sandboxes),
        )
    )


def _mix(before: float, now: float) -> float:
    return (1 - _SMOOTHING) * before + _SMOOTHING * now


def _rounded(load: Load) -> Load:
    return Load(**{name: round(value, 4) for name, value in load.model_dump().items()})


@dataclass(frozen=True)
class Advertised:
    """What does not change while this process lives."""

    session: str
    backends: tuple[str, ...]
    capabilities: tuple[str, ...]
    arch: str
    pool: str


class Heart:
    """beat() builds one heartbeat and sends it; run() does so for ever."""

    def __init__(
        self,
        node: Node,
        bus: Bus,
        table: Table,
        facts: Facts,
        point: OperatingPoint,
        switches: Switches,
        lease: AnnounceLease,
        advertised: Advertised,
    ) -> None:
        self._node = node
        self._bus = bus
        self._table = table
        self._facts = facts
        self._point = point
        self._switches = switches
        self._lease = lease
        self._advertised = advertised
        self._seq = 0
        self._load: Load | None = None
        self._bus_up = True

    async def run(self) -> None:
        """A missed beat is not made up for: the next one says what is true then."""
        while True:
            self._notice_bus()
            try:
                await self.beat()
            except DSecError as err:
                _log.debug("heartbeat not sent", error=str(err))
            await self._node.clock.sleep(HEARTBEAT_S)

    async def beat(self) -> None:
        facts = self._facts.read(self._table)
        measured = self._facts.measured()
        self._load = smoothed(self._load, load_now(facts, self._point, measured.total_memory_mib))
        self._seq += 1
        beat = self._compose(facts, measured, self._load)
        self._lease.sent(self._seq)
        await self._bus.publish(subjects.HEARTBEAT, beat, node=self._node.name)

    def _compose(self, facts: NodeFacts, measured: Measured, load: Load) -> Heartbeat:
        advertised, point = self._advertised, self._point
        states = [s.status.state for s in self._table]
        return Heartbeat(
            node=self._node.name,
            incarnation=self._node.incarnation,
            session=advertised.session,
            seq=self._seq,
            backends=advertised.backends,
            capabilities=advertised.capabilities,
            arch=advertised.arch,
            pool=advertised.pool,
            cordoned=self._switches.cordoned,
            draining=self._switches.draining,
            policy_ready=facts.policy_ready,
            snapshotter_ready=self._node.snapshotter.health.ready,
            running=states.count(State.READY),
            paused=states.count(State.PAUSED),
            creating=facts.creating,
            max_sandboxes=point.max_sandboxes,
            max_creating=point.max_creating,
            memory_mib=measured.total_memory_mib - point.memory_reserve_mib,
            cpus=facts.cores,
            disk_mib=measured.total_disk_mib - point.disk_reserve_mib,
            free_memory_mib=max(0, measured.available_memory_mib - point.memory_reserve_mib),
            free_disk_mib=max(0, measured.free_disk_mib - point.disk_reserve_mib),
            load=load,
            layers_epoch=self._node.layers.epoch,
        )

    def _notice_bus(self) -> None:
        """Idle time stands still while nobody can reach the sandboxes."""
        up = self._bus.ready
        if up != self._bus_up:
            self._bus_up = up
            now = self._node.clock.monotonic_s()
            for sandbox in self._table:
                sandbox.clocks.set_bus(up, now)
