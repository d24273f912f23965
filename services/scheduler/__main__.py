"""Composition of a scheduler."""

from __future__ import annotations

from redis.asyncio import Redis

from libdsec.wire import subjects
from libdsec.wire.placement import PlaceRequest

from ..chassis.consumer import Consumer
from ..chassis.redis import connect_redis
from ..chassis.run import run
from ..chassis.service import Service
from ..chassis.topology import ensure_topology
from .burst import Burst
from .cluster import ClusterState
from .driver import Driver
from .handlers import Verbs
from .lanes import Lanes
from .layers import Layers
from .metrics import SchedulerMetrics, WatcherMetrics
from .settings import Role, SchedulerSettings
from .view import View
from .watcher import Watcher


async def setup(service: Service[SchedulerSettings]) -> None:
    settings = service.settings
    redis = connect_redis(settings.redis_url)
    service.stack.push_async_callback(redis.aclose)
    await ensure_topology(
        service.bus,
        streams=subjects.STREAMS,
        durables=subjects.LANES.values(),
        buckets=subjects.BUCKETS,
        replicas=settings.stream_replicas,
    )
    if Role.WATCH in settings.roles:
        await watch(service, redis)
    if Role.PLACE in settings.roles:
        await schedule(service, redis)


async def watch(service: Service[SchedulerSettings], redis: Redis) -> None:
    watcher = Watcher(service.bus, redis, service.clock, WatcherMetrics(service.metrics.registry))
    await watcher.start()
    service.spawn(watcher.run(), name="watcher")
    service.ready_when("writing the view", lambda: watcher.writing)


async def schedule(service: Service[SchedulerSettings], redis: Redis) -> None:
    settings, bus, clock = service.settings, service.bus, service.clock
    metrics = SchedulerMetrics(service.metrics.registry)
    cluster = ClusterState(clock=clock.monotonic_s, k=settings.sample_k)
    view = View(redis, cluster, clock, metrics)
    layers = Layers(bus, clock.monotonic_s)
    burst = Burst(bus, utilisation=lambda: cluster.utilisation, monotonic=clock.monotonic_s)
    driver = Driver(bus, layers, burst)
    await view.read()
    service.spawn(view.run(), name="view")
    service.ready_when("view", lambda: view.fresh)
    service.debug("nodes", lambda: view.listing().model_dump(mode="json"))
    await Verbs(bus, driver, view).serve()
    lanes = Lanes(driver, cluster, clock, metrics)
    for durable in subjects.LANES.values():
        consumer: Consumer[PlaceRequest] = Consumer(
            bus, durable, subjects.PLACE, clock=clock, observer=service.metrics.consumer
        )
        await service.consume(consumer, lanes.handle, concurrency=settings.concurrency)


if __name__ == "__main__":
    run("scheduler", SchedulerSettings, setup)
