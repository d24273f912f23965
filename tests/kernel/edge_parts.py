"""An edge's own parts on this host's kernel, without a bus: what acquires, runs and releases.

The two peers are played here, with the real ones' interface; everything else is the real thing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, cast

from libdsec.bus import Call
from libdsec.wire.envelope import H_STREAM
from libdsec.wire.execution import ExecDone, ExecRequest
from libdsec.wire.ids import new_sandbox_id, random_name
from libdsec.wire.layer import ImageConfig, LayerInfo, LayerKind, ResolvedLayers
from libdsec.wire.model import Message
from libdsec.wire.policy import ApplyPolicy, PolicyInForce
from libdsec.wire.sandbox import Resources, SandboxSpec, State
from libhost.aio import HostThreads
from libhost.cgroup import CgroupLayout, NodeCgroups
from libhost.crun import Runtime
from libhost.disk import DiskMode, empty_trash, open_disk
from libhost.erofs import build_image
from libhost.layer import mounted_layers, umount_layer
from libhost.net import NodeNetwork
from libhost.overlay import OverlayMode
from libhost.paths import NodePaths
from libhost.sweep import Host
from services.chassis.clock import Clock
from services.edge.exec import Execs
from services.edge.fault import faults
from services.edge.journal import Journal
from services.edge.layers.mounts import LayerMounts, NodeMounter
from services.edge.layers.store import DirectoryStore
from services.edge.lifecycle import Lifecycle
from services.edge.node import Node, StartOptions
from services.edge.pause import Pauses
from services.edge.peers import PolicyPeer, SnapshotterPeer
from services.edge.record import Origin, Records
from services.edge.sandbox import Sandbox
from services.edge.settings import built
from services.edge.table import Table
from services.edge.tasks import Tasks
from services.edge.timing import Phases
from services.images import busybox

SMALL = Resources(memory_mib=64, disk_mib=32, max_files=2000, shm_mib=16, pids=64)


class PlayedPolicy:
    """Says yes to everything, and remembers what is in force."""

    def __init__(self) -> None:
        self.in_force: dict[str, ApplyPolicy] = {}
        self.hosts: dict[str, str] = {}

    async def apply(self, apply: ApplyPolicy) -> PolicyInForce:
        self.in_force[apply.sandbox_id] = apply
        return PolicyInForce(generation=apply.generation, hosts=self.hosts)

    async def check(self, policy: object) -> None:
        return None

    async def remove(self, sandbox_id: str) -> None:
        self.in_force.pop(sandbox_id, None)


class AbsentSnapshotter:
    async def freeze(self, request: object) -> None:
        return None

    async def thaw(self, request: object) -> None:
        return None


class Caller(Call):
    """A call of the bus, without a bus."""

    def __init__(self, project: str = "p") -> None:
        self.project = project
        self.parts: list[tuple[str, bytes, Mapping[str, str]]] = []

    async def send(
        self, kind: str, data: bytes | Message, headers: Mapping[str, str] | None = None
    ) -> None:
        payload = data.encode() if isinstance(data, Message) else data
        self.parts.append((kind, payload, headers or {}))

    def output(self, stream: int = 1) -> bytes:
        return b"".join(d for _, d, h in self.parts if h.get(H_STREAM) == str(stream))


@dataclass
class Parts:
    """One node's parts; `sandbox` and `run` are what tests mostly need."""

    node: Node
    table: Table
    tasks: Tasks
    lifecycle: Lifecycle
    pauses: Pauses
    execs: Execs
    policy: PlayedPolicy
    base: ResolvedLayers
    changes: list[tuple[str, State, str]] = field(default_factory=list)

    def origin(self, **spec: Any) -> Origin:
        return Origin(
            sandbox_id=new_sandbox_id(self.node.name, self.node.incarnation),
            project="p",
            request_id="r",
            index=0,
            spec=SandboxSpec(**{"image": "busybox@1", "resources": SMALL, **spec}),
            image=self.base.config,
            digests=tuple(layer.digest for layer in self.base.all),
            created_at=self.node.clock.wall_s(),
        )

    async def sandbox(self, **spec: Any) -> Sandbox:
        sandbox = self.lifecycle.accept(self.origin(**spec))
        await self.lifecycle.create(sandbox, self.base, Phases())
        return sandbox

    async def run(
        self, sandbox: Sandbox, shell: str, *, caller: Caller | None = None, **fields: Any
    ) -> ExecDone:
        request = ExecRequest(
            sandbox_id=sandbox.id, exec_id=fields.pop("exec_id", random_name(8)), shell=shell,
            **fields,
        )  # fmt: skip
        done = await self.execs.exec(request, caller or Caller())
        assert done is not None
        return done


def make_base(store: DirectoryStore) -> ResolvedLayers:
    """The busybox base as one layer."""
    with store.staging() as work:
        busybox.make(work / "base.tar")
        with tarfile.open(work / "base.tar") as tar:
            tar.extractall(work / "tree", filter="fully_trusted")
        build_image(work / "tree", work / "image")
        stored = store.put(work / "image")
    info = LayerInfo(
        space="public", name="busybox", version="1", digest=stored.digest, kind=LayerKind.BASE,
        size_bytes=stored.size_bytes, files=1, created_at=0.0, config=ImageConfig(env={"L": "1"}),
    )  # fmt: skip
    return ResolvedLayers(base=info)


def open_host(paths: NodePaths) -> Host:
    layout = CgroupLayout.detect(Path("/proc/self/mountinfo").read_text())
    cgroups = NodeCgroups(layout, paths)
    cgroups.ensure()
    third = int.from_bytes(os.urandom(1))
    network = NodeNetwork(paths, IPv4Network(f"100.99.{third}.0/24"), pool_size=1)
    network.ensure()
    return Host(
        paths=paths,
        cgroups=cgroups,
        disk=open_disk(paths, DiskMode.LOOP, OverlayMode.SET_FD, pool_size=4),
        network=network,
        runtime=Runtime(
            paths,
            crun=Path("/usr/bin/crun"),
            launcher=built("dsec-launch"),
            agent=built("aether"),
        ),
    )


@contextlib.asynccontextmanager
async def edge_parts(fault: str = "") -> AsyncIterator[Parts]:
    directory = Path(tempfile.mkdtemp(prefix="dsec-t"))
    name = f"t{random_name(6)}"
    paths = NodePaths(name, directory / "state", directory / "run")
    paths.live_dir.mkdir(parents=True)  # a tmpfs where an edge has its namespace
    threads, clock = HostThreads(8), Clock()
    host = await threads.run(30, open_host, paths)
    store = DirectoryStore(directory / "store", clock)
    journal = Journal.open(paths.state_dir)
    layers = LayerMounts(NodeMounter(paths), store, threads, clock=clock)
    policy = PlayedPolicy()
    node = Node(
        name=name, incarnation="aaaaaa", boot_id="this-boot", host=host,
        overlay=OverlayMode.SET_FD, threads=threads, layers=layers,
        policy=cast("PolicyPeer", policy),
        snapshotter=cast("SnapshotterPeer", AbsentSnapshotter()),
        records=Records(journal), clock=clock, options=StartOptions(parallel_starts=4),
        fault=faults(fault),
    )  # fmt: skip
    table, tasks = Table(name, "aaaaaa", node.records, clock), Tasks()
    changes: list[tuple[str, State, str]] = []

    def observe(sandbox: Sandbox, state: State, reason: str) -> None:
        changes.append((sandbox.id, state, reason))

    lifecycle = Lifecycle(node, table, tasks, observe)
    pauses = Pauses(node, tasks, observe)
    execs = Execs(node, table, pauses, tasks)
    base = make_base(store)
    parts = Parts(node, table, tasks, lifecycle, pauses, execs, policy, base, changes)
    try:
        yield parts
    finally:
        await end_all(parts)
        await layers.close()
        journal.close()
        await threads.run(30, close_host, host)
        threads.close()
        for layer in mounted_layers(paths).values():
            umount_layer(paths, layer)
        empty_trash(paths, budget_files=10_000)
        host.cgroups.remove()
        shutil.rmtree(directory)


def close_host(host: Host) -> None:
    host.disk.close()
    if host.network is not None:
        host.network.close()
        host.network.remove_gateway()
    host.runtime.close()


async def end_all(parts: Parts) -> None:
    from libdsec.errors import DeathReason

    for sandbox in parts.table:
        await parts.lifecycle.end(sandbox, DeathReason.STOPPED)
    await parts.tasks.close(timeout_s=5)
