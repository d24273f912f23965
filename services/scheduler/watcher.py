"""The watcher role: heartbeats in, the coarse view in Redis and acknowledgements out.

Any number of watchers share the heartbeats; what they write is idempotent. An acknowledgement says
that the node has been heard, so it is sent whether or not Redis takes the view: while Redis is away
no scheduler reads it, and a view that cannot be read declares nobody lost.
"""

from __future__ import annotations

from typing import Any, Final, cast

import structlog
from redis.asyncio import Redis

from libdsec.bus import Bus, Call
from libdsec.errors import Unavailable
from libdsec.wire import subjects
from libdsec.wire.node import Heartbeat, HeartbeatAck

from ..chassis.clock import Clock
from ..chassis.redis import redis_errors
from .metrics import WatcherMetrics

WRITE_EVERY_S: Final = 0.1

_log = structlog.get_logger("scheduler.watcher")


class Watcher:
    """start() subscribes; run() writes what has come in since the last time."""

    def __init__(self, bus: Bus, redis: Redis, clock: Clock, metrics: WatcherMetrics) -> None:
        self._bus = bus
        self._redis = redis
        self._clock = clock
        self._metrics = metrics
        self._fresh: dict[str, bytes] = {}  # one per node: bounded by their number
        self.writing = True

    async def start(self) -> None:
        await self._bus.subscribe(
            subjects.HEARTBEAT, self._heard, queue=subjects.Q_WATCHERS, backlog=4096
        )

    async def run(self) -> None:
        while True:
            await self._clock.sleep(WRITE_EVERY_S)
            if self._fresh:
                await self._write()

    async def _heard(self, beat: Heartbeat, call: Call) -> None:
        if beat.node != call.node:
            _log.warning("a node spoke for another", node=call.node, claims=beat.node)
            return
        self._metrics.heartbeats.inc()
        self._fresh[beat.node] = beat.encode()
        ack = HeartbeatAck(node=beat.node, session=beat.session, seq=beat.seq)
        try:
            await self._bus.publish(subjects.HEARTBEAT_ACK, ack, node=beat.node)
        except Unavailable:
            return  # the next heartbeat is a second away

    async def _write(self) -> None:
        fresh, self._fresh = self._fresh, {}
        try:
            with redis_errors("writing the view"):
                mapping = cast("dict[Any, Any]", fresh)
                await self._redis.hset(subjects.REDIS_NODES, mapping=mapping)
        except Unavailable as err:
            self._fresh = fresh | self._fresh
            self._say(writing=False, why=str(err))
        else:
            self._say(writing=True)

    def _say(self, *, writing: bool, why: str = "") -> None:
        if writing != self.writing:
            self.writing = writing
            _log.warning("the view is being written again" if writing else why)
        self._metrics.writing.set(writing)
