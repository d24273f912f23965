"""The coarse view: one read of one hash per interval, judged by `nodes` and shown to placement.

While Redis is away the last view stays: nobody grows older in it, nobody is declared lost, and
placement goes on as long as edges answer.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from typing import Final, cast

import structlog
from pydantic import ValidationError
from redis.asyncio import Redis

from libdsec.errors import Unavailable
from libdsec.wire import subjects
from libdsec.wire.node import Heartbeat, NodeListing, NodeState

from ..chassis.clock import Clock
from ..chassis.redis import redis_errors
from .cluster import ClusterState
from .metrics import SchedulerMetrics
from .nodes import NodeTable

READ_EVERY_S: Final = 0.5
STALE_AFTER_S: Final = 3.0

_log = structlog.get_logger("scheduler.view")


class View:
    """run() keeps `cluster` up to date."""

    def __init__(
        self, redis: Redis, cluster: ClusterState, clock: Clock, metrics: SchedulerMetrics
    ) -> None:
        self._redis = redis
        self._cluster = cluster
        self._clock = clock
        self._metrics = metrics
        self._table = NodeTable(clock.monotonic_s)
        self._read_at = clock.monotonic_s() - STALE_AFTER_S
        self._fresh = True
        metrics.watch_view(lambda: self.age_s, self._count)

    @property
    def age_s(self) -> float:
        return self._clock.monotonic_s() - self._read_at

    @property
    def fresh(self) -> bool:
        return self.age_s < STALE_AFTER_S

    def listing(self) -> NodeListing:
        return NodeListing(nodes=tuple(self._table.views()), lost_frozen=self._table.frozen)

    async def run(self) -> None:
        while True:
            await self.read()
            await self._clock.sleep(READ_EVERY_S)

    async def read(self) -> None:
        """One round trip."""
        try:
            with redis_errors("reading the view"):
                values = await cast(
                    "Awaitable[list[bytes]]", self._redis.hvals(subjects.REDIS_NODES)
                )
        except Unavailable as err:
            self._say_fresh(fresh=False, why=str(err))
            return
        self._say_fresh(fresh=True)
        self._read_at = self._clock.monotonic_s()
        frozen, lost = self._table.frozen, self._lost()
        self._table.observe(filter(None, map(_beat, values)))
        self._cluster.show(self._table.views())
        self._report(frozen, lost)
        await self._forget()

    async def _forget(self) -> None:
        gone = self._table.forget()
        if not gone:
            return
        _log.warning("nodes forgotten: they have been lost for long", nodes=gone)
        with suppress(Unavailable), redis_errors("forgetting nodes"):
            await self._redis.hdel(subjects.REDIS_NODES, *gone)

    def _report(self, was_frozen: bool, lost_before: frozenset[str]) -> None:
        if self._table.frozen and not was_frozen:
            _log.error(
                "many nodes fell silent together: nobody is declared lost until they are heard",
                silent=self._count(NodeState.SUSPECT),
                known=len(self._table.views()),
            )
        elif was_frozen and not self._table.frozen:
            _log.warning("lost declarations go on")
        for node in self._lost() - lost_before:
            _log.error("node lost: no heartbeat for a whole lease", node=node)
        for node in lost_before - self._lost():
            _log.warning("a lost node is back", node=node)
        self._metrics.lost_frozen.set(self._table.frozen)

    def _lost(self) -> frozenset[str]:
        return frozenset(v.heartbeat.node for v in self._table.views() if v.state is NodeState.LOST)

    def _count(self, state: NodeState) -> int:
        return sum(view.state is state for view in self._table.views())

    def _say_fresh(self, *, fresh: bool, why: str = "") -> None:
        if fresh != self._fresh:
            self._fresh = fresh
            _log.warning("the view is read again" if fresh else f"{why}; the last view stays")


def _beat(value: bytes) -> Heartbeat | None:
    try:
        return Heartbeat.model_validate_json(value)
    except ValidationError as err:
        _log.warning("not a heartbeat in the view", error=str(err))
        return None
