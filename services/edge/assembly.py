"""Puts an edge together, in the order in which a start has to happen.

    lock -> journal -> host -> layers -> adopt what lives -> sweep what belongs to nobody ->
    go on with what was accepted -> serve

Nothing is served before the sweep is done, so nothing that is being made can be mistaken for a
leftover. What is opened here is closed by the service's stack, in the reverse, after the drain.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libdsec.errors import Unsupported
from libdsec.wire import subjects
from libdsec.wire.ids import new_incarnation
from libdsec.wire.model import random_token
from libdsec.wire.sandbox import Backend
from libhost.aio import HostThreads
from libhost.cgroup import NodeCgroups
from libhost.crun import Runtime
from libhost.disk import open_disk
from libhost.net import NodeNetwork
from libhost.overlay import OverlayMode
from libhost.paths import NodePaths
from libhost.probe import HostCapabilities, probe_host
from libhost.sweep import Host

from ..chassis.service import Service
from .adoption import held_layers
from .chronicle import Chronicle
from .fault import faults
from .heartbeat import Advertised
from .journal import Journal
from .layers.publish import PublishPolicy
from .layers.serve import LayerOptions, open_layers
from .lock import only_edge
from .node import Node, StartOptions
from .peers import PolicyPeer, SnapshotterPeer
from .record import NodeRecord, Records
from .settings import EdgeSettings
from .switches import Switches

EdgeService = Service[EdgeSettings]

_PROBE_TIMEOUT_S: Final = 60.0
_HAND_OVER_S: Final = 2.0
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Ground:
    """What stands before any sandbox is looked at."""

    paths: NodePaths
    capabilities: HostCapabilities
    overlay: OverlayMode
    records: Records
    switches: Switches
    session: str


def node_paths(settings: EdgeSettings) -> NodePaths:
    return NodePaths(settings.node, settings.state_dir, settings.run_dir)


async def lay_ground(service: EdgeService) -> Ground:
    """Raises Conflict for a second edge, Unsupported for a host that can run no sandbox."""
    settings = service.settings
    paths = node_paths(settings)
    service.stack.enter_context(only_edge(paths.lock_file, settings.node))
    probing = HostThreads(1)
    capabilities = await probing.run(_PROBE_TIMEOUT_S, probe_host, paths.state_dir)
    probing.close()
    if capabilities.problems or capabilities.overlay is None:
        raise Unsupported(
            f"this host can run no sandbox: {'; '.join(capabilities.problems)}",
            hint="`dsec doctor` says what to do about it",
        )
    journal = Journal.open(paths.state_dir)
    service.stack.callback(journal.close)
    service.spawn(journal.wait_broken(), name="journal")
    records = Records(journal)
    record = records.node()
    if record is None:
        record = NodeRecord(incarnation=new_incarnation())
        records.save_node(record)
        await journal.sync()
    session = random_token(6)
    return Ground(
        paths, capabilities, capabilities.overlay, records, Switches(record, records), session
    )


async def meet_peers(service: EdgeService) -> tuple[PolicyPeer, SnapshotterPeer]:
    node, clock = service.settings.node, service.clock
    policy = PolicyPeer(service.bus, node, clock.monotonic_s)
    snapshotter = SnapshotterPeer(service.bus, node, clock.monotonic_s)
    await service.bus.subscribe(subjects.POLICY_HEALTH, policy.on_health, node=node)
    await service.bus.subscribe(subjects.SNAPSHOT_HEALTH, snapshotter.on_health, node=node)
    return policy, snapshotter


async def build_node(
    service: EdgeService, ground: Ground, policy: PolicyPeer, snapshotter: SnapshotterPeer
) -> Node:
    settings = service.settings
    parallel = settings.starts_at_once
    threads = HostThreads(2 * parallel + 4)  # a start has two branches; stops come on top
    service.stack.callback(threads.close)
    host = await threads.run(_PROBE_TIMEOUT_S, open_host, settings, ground)
    service.stack.callback(close_host, host)
    layers = await open_layers(
        service,
        LayerOptions(
            store=settings.layer_store,
            publish=settings.publish,
            idle_grace_s=settings.layer_idle_grace_s,
            policy=PublishPolicy(public_publishers=frozenset(settings.public_publishers)),
        ),
        ground.paths,
        threads,
        held_layers(ground.records.alive()),
    )
    return Node(
        name=settings.node,
        incarnation=ground.switches.incarnation,
        boot_id=_BOOT_ID.read_text().strip(),
        host=host,
        overlay=ground.overlay,
        threads=threads,
        layers=layers,
        policy=policy,
        snapshotter=snapshotter,
        records=ground.records,
        clock=service.clock,
        options=StartOptions(parallel, settings.nameservers, settings.step_timeout_s),
        fault=faults(settings.fault),
    )


def open_host(settings: EdgeSettings, ground: Ground) -> Host:
    """Blocking."""
    paths, found = ground.paths, ground.capabilities
    if found.cgroups is None or found.disk is None:
        raise Unsupported("this host has no cgroups or no limited disk")
    cgroups = NodeCgroups(found.cgroups, paths)
    cgroups.ensure()
    network = None
    if settings.addresses is not None:
        network = NodeNetwork(paths, settings.addresses, pool_size=settings.link_pool)
        network.ensure()
    return Host(
        paths=paths,
        cgroups=cgroups,
        disk=open_disk(paths, found.disk, ground.overlay, pool_size=settings.disk_pool),
        network=network,
        runtime=Runtime(
            paths, crun=settings.crun, launcher=settings.launcher, agent=settings.agent
        ),
    )


def close_host(host: Host) -> None:
    """Give back what was kept ready; what sandboxes hold stays."""
    host.disk.close()
    if host.network is not None:
        host.network.close()
    host.runtime.close()


def open_chronicle(service: EdgeService, session: str) -> Chronicle:
    chronicle = Chronicle(service.bus, service.settings.node, session, service.clock)
    service.spawn(chronicle.outbox.run(), name="outbox")

    async def hand_over() -> None:
        await chronicle.outbox.flush(_HAND_OVER_S)

    service.on_drain(hand_over)
    return chronicle


def advertised(settings: EdgeSettings, ground: Ground, node: Node) -> Advertised:
    """What a scheduler may count on; only what this host was seen to do."""
    capabilities = [f"disk={node.host.disk.mode.value}"]
    if settings.publish:
        capabilities.append("publish")
    if node.host.network is not None:
        capabilities.append("egress")
    if ground.capabilities.core_scheduling.ok:
        capabilities.append("core_scheduling")
    return Advertised(
        session=ground.session,
        backends=(Backend.CONTAINER.value,),
        capabilities=tuple(capabilities),
        arch=platform.machine(),
        pool=settings.pool,
    )
