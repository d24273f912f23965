"""What belongs to no sandbox of the journal: found by name, removed in reverse, counted.

At a start, before anything is served, it removes what a killed predecessor had half made or half
unmade. Later it comes round now and then for what a release could not remove.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import structlog

from libdsec.errors import DSecError
from libhost.sweep import Host, Remains, find_remains, remove_sandbox

from .gauges import EdgeMetrics
from .node import Node
from .policing import Policing
from .table import Table

_log = structlog.get_logger("edge.reclaim")

SWEEP_INTERVAL_S: Final = 60.0
_REMOVE_TIMEOUT_S: Final = 10.0
_SETTLE_S: Final = 5.0


@dataclass
class Reclaimed:
    """What one sweep found: how many sandboxes' remains, where, and what would not go."""

    found: int = 0
    places: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    policies: int = 0


class Reclaim:
    """sweep() once at the start, then run()."""

    def __init__(self, node: Node, table: Table, policing: Policing, metrics: EdgeMetrics) -> None:
        self._node = node
        self._table = table
        self._policing = policing
        self._metrics = metrics

    async def run(self) -> None:
        await self._node.clock.sleep(_SETTLE_S)  # then the policy service has been heard of
        while True:
            await self.sweep()
            self._table.forget_old()
            await self._node.clock.sleep(SWEEP_INTERVAL_S)

    async def sweep(self) -> Reclaimed:
        """Remove what nobody owns. What is being created or ended right now is in the table."""
        host, reclaimed = self._node.host, Reclaimed()
        remains = await self._node.run(find_remains, host)
        mine = {host.paths.sandbox(s.id).slot for s in self._table}
        for one in _ownerless(remains.values(), mine):
            errors = await self._node.run(_remove, host, one)
            reclaimed.found += 1
            reclaimed.places.update(one.found_in)
            reclaimed.failed += bool(errors)
            _log.info(
                "reclaimed",
                sandbox=one.sandbox_id or f"slot {one.slot}",
                found_in=sorted(one.found_in),
                errors=[repr(err) for err in errors],
            )
        reclaimed.policies = await self._reconcile_policies()
        self._metrics.count_reclaimed(reclaimed.places)
        return reclaimed

    async def _reconcile_policies(self) -> int:
        if not self._node.policy.health.ready:
            return 0
        try:
            found = await self._node.policy.reconcile(tuple(s.id for s in self._table))
            for sandbox_id in found.missing:
                sandbox = self._table.get(sandbox_id)
                if sandbox is not None:
                    _log.warning("policy lost, put back", sandbox=sandbox_id)
                    await self._policing.put_back(sandbox)
            return found.removed
        except DSecError as err:
            _log.warning("policies not reconciled", error=str(err))
            return 0


def _remove(host: Host, remains: Remains) -> list[Exception]:
    return remove_sandbox(host, remains, timeout_s=_REMOVE_TIMEOUT_S)


def _ownerless(remains: Collection[Remains], mine: set[str]) -> list[Remains]:
    return [one for one in remains if one.slot not in mine]
