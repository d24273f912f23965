"""Composition of a snapshotter worker."""

from __future__ import annotations

import contextlib

from libdsec.errors import Unavailable, Unsupported
from libdsec.wire import subjects
from libdsec.wire.snapshot import SnapshotterHealth, queue_group
from libhost.aio import HostThreads
from libhost.cgroup import NodeCgroups
from libhost.paths import NodePaths
from libhost.probe import probe_host

from ..chassis.run import run
from ..chassis.service import Service
from .handlers import Pauses
from .metrics import PauseMetrics
from .pause import Pauser
from .settings import SnapshotterSettings

_PROBE_TIMEOUT_S = 60.0


async def setup(service: Service[SnapshotterSettings]) -> None:
    settings = service.settings
    probing = HostThreads(1)
    host = await probing.run(_PROBE_TIMEOUT_S, probe_host, settings.state_dir)
    probing.close()
    if host.cgroups is None:
        raise Unsupported(f"no sandbox can be paused here: {host.cgroups_reason}")
    paths = NodePaths(settings.node, settings.state_dir, settings.run_dir)
    pauser = Pauser(NodeCgroups(host.cgroups, paths), host)
    metrics = PauseMetrics(service.metrics.registry)
    pauses = Pauses(settings.node, pauser, settings.parallel_pauses, metrics)
    service.stack.callback(pauses.close)
    await serve(service, pauses)
    service.spawn(report_health(service), name="health")


async def serve(service: Service[SnapshotterSettings], pauses: Pauses) -> None:
    """In a queue group of the node's own: each request goes to one of its workers."""
    node, parallel = service.settings.node, service.settings.parallel_pauses
    group = queue_group(node)
    await service.bus.serve(
        subjects.SNAPSHOT_FREEZE, pauses.freeze, node=node, queue=group, concurrency=parallel
    )
    await service.bus.serve(
        subjects.SNAPSHOT_THAW, pauses.thaw, node=node, queue=group, concurrency=parallel
    )


async def report_health(service: Service[SnapshotterSettings]) -> None:
    health = SnapshotterHealth(ready=True)
    while True:
        with contextlib.suppress(Unavailable):  # the bus comes back, and so does the next report
            await service.bus.publish(subjects.SNAPSHOT_HEALTH, health, node=service.settings.node)
        await service.clock.sleep(service.settings.health_interval_s)


if __name__ == "__main__":
    run("snapshotter", SnapshotterSettings, setup)
