"""An edge as a process on a real bus, with a scheduler and a policy service played by the test.

The edge, its kernel and NATS are the real ones. What is played keeps to the contracts in
`libdsec.wire`, so an edge cannot tell the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libdsec.bus import Bus, Call, Part
from libdsec.errors import DSecError, NotFound, Unavailable, Unsupported
from libdsec.wire import subjects
from libdsec.wire.execution import ExecDone, ExecRequest
from libdsec.wire.ids import random_name
from libdsec.wire.layer import ResolvedLayers
from libdsec.wire.model import Empty
from libdsec.wire.node import Heartbeat, HeartbeatAck
from libdsec.wire.placement import (
    AcceptedItem,
    Announcement,
    Inquiry,
    Offer,
    OfferReply,
    ReadyItem,
    Verdict,
    Verdicts,
)
from libdsec.wire.policy import (
    ApplyPolicy,
    CheckPolicy,
    PolicyHealth,
    PolicyInForce,
    Reconciled,
    ReconcilePolicy,
    RemovePolicy,
)
from libdsec.wire.sandbox import ById, SandboxInfo, SandboxSpec, StopSandbox
from libhost.cgroup import CgroupLayout, NodeCgroups
from libhost.disk import empty_trash
from libhost.enter import remove_node_namespace
from libhost.net import NodeNetwork
from libhost.paths import SLOT_PATTERN, NodePaths
from services.chassis.clock import Clock
from services.edge.layers.store import DirectoryStore

from ..integration.servers import NatsServer
from .edge_parts import SMALL, make_base

ROOT = Path(__file__).parents[2]
PROJECT = "p"


@dataclass
class Played:
    """The policy service and the schedulers, as far as an edge sees them."""

    bus: Bus
    node: str
    heartbeats: list[Heartbeat] = field(default_factory=list)
    policies: dict[str, ApplyPolicy] = field(default_factory=dict)
    claims: dict[str, dict[int, str]] = field(default_factory=dict)  # request -> item -> sandbox
    policy_ready: bool = True
    acknowledge: bool = True

    async def start(self) -> None:
        serve, at = self.bus.serve, {"node": self.node}
        await serve(subjects.POLICY_APPLY, self._apply, **at)
        await serve(subjects.POLICY_CHECK, self._check, **at)
        await serve(subjects.POLICY_REMOVE, self._remove, **at)
        await serve(subjects.POLICY_RECONCILE, self._reconcile, **at)
        await serve(subjects.INQUIRE, self._inquire, **at)
        await self.bus.subscribe(subjects.HEARTBEAT, self._heartbeat, **at)

    async def report(self) -> None:
        while True:
            health = PolicyHealth(
                ready=self.policy_ready, reason="" if self.policy_ready else "off"
            )
            with contextlib.suppress(Unavailable):
                await self.bus.publish(subjects.POLICY_HEALTH, health, node=self.node)
            await asyncio.sleep(0.3)

    async def _apply(self, apply: ApplyPolicy, _: Call) -> PolicyInForce:
        self.policies[apply.sandbox_id] = apply
        return PolicyInForce(generation=apply.generation)

    async def _check(self, check: CheckPolicy, _: Call) -> PolicyInForce:
        if any("**" not in path for path in check.policy.protected_paths):
            raise Unsupported("this node protects whole trees only")
        return PolicyInForce(generation=0)

    async def _remove(self, remove: RemovePolicy, _: Call) -> Empty:
        self.policies.pop(remove.sandbox_id, None)
        return Empty()

    async def _reconcile(self, reconcile: ReconcilePolicy, _: Call) -> Reconciled:
        gone = set(self.policies) - set(reconcile.sandbox_ids)
        for sandbox_id in gone:
            del self.policies[sandbox_id]
        missing = set(reconcile.sandbox_ids) - set(self.policies)
        return Reconciled(removed=len(gone), missing=tuple(missing))

    async def _heartbeat(self, beat: Heartbeat, _: Call) -> None:
        self.heartbeats.append(beat)
        if self.acknowledge:
            ack = HeartbeatAck(node=self.node, session=beat.session, seq=beat.seq)
            await self.bus.publish(subjects.HEARTBEAT_ACK, ack, node=self.node)

    async def _inquire(self, inquiry: Inquiry, _: Call) -> Verdicts:
        return Verdicts(verdicts=tuple(self.verdict(held.request_id) for held in inquiry.held))

    def verdict(self, request_id: str) -> Verdict:
        items = self.claims.get(request_id, {})
        pairs = tuple(AcceptedItem(index=i, sandbox_id=s) for i, s in items.items())
        return Verdict(request_id=request_id, project=PROJECT, epoch=1, confirmed=pairs)


@dataclass
class EdgeWorld:
    """start() an edge, place() sandboxes, use them; `kill` and start again as often as you like."""

    paths: NodePaths
    directory: Path
    nats: NatsServer
    bus: Bus
    played: Played
    base: ResolvedLayers
    network: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def node(self) -> str:
        return self.paths.node

    @property
    def log(self) -> str:
        return (self.directory / "edge.log").read_text(errors="replace")

    async def start(self, **env: str) -> None:
        """Returns when the edge's first heartbeat of its new session has been acknowledged."""
        await self.kill()
        seen = len(self.played.heartbeats)
        self.process = self.spawn(**env)
        async with asyncio.timeout(20):
            while len(self.played.heartbeats) < seen + 2:
                assert self.process.poll() is None, self.log[-3000:]
                await asyncio.sleep(0.01)

    def spawn(self, **env: str) -> subprocess.Popen[bytes]:
        settings = {
            "PATH": os.environ["PATH"],
            "DSEC_NODE": self.node,
            "DSEC_STATE_DIR": str(self.paths.state_dir),
            "DSEC_RUN_DIR": str(self.paths.run_dir),
            "DSEC_LAYER_STORE": str(self.directory / "store"),
            "DSEC_NATS_SERVERS": f'["{self.nats.url}"]',
            "DSEC_HTTP_PORT": "0",
            "DSEC_ADDRESSES": self.network,
            "DSEC_DISK_POOL": "4",
            "DSEC_LINK_POOL": "1",
            **env,
        }
        with (self.directory / "edge.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "services.edge"],
                cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    async def kill(self, number: int = signal.SIGKILL) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        return await asyncio.to_thread(process.wait, 30)

    # --- as a scheduler and a caller ---

    async def place(self, count: int = 1, *, budget_s: float = 20.0, **spec: Any) -> list[str]:
        """Ids of the sandboxes that were announced."""
        return [item.sandbox_id for item in await self.announced(count, budget_s=budget_s, **spec)]

    async def announced(
        self, count: int = 1, *, budget_s: float = 20.0, **spec: Any
    ) -> list[ReadyItem]:
        async with self.bus.inbox() as inbox:
            offer = self.offer(count, inbox.subject, inbox.nonce, budget_s, **spec)
            reply = await self.offered(offer)
            if reply.refused is not None:
                raise reply.refused.exception()
            await self.confirm(offer, reply)
            ready: list[ReadyItem] = []
            while len(ready) < count:
                part: Part = await inbox.next(budget_s)
                told = part.decode(Announcement)
                for error in told.failed.values():
                    raise error.exception()
                ready += told.ready
            return ready

    def offer(
        self, count: int, reply_to: str, nonce: str, budget_s: float = 20.0, **spec: Any
    ) -> Offer:
        request_id = f"r{random_name(8)}"
        return Offer(
            request_id=request_id,
            project=PROJECT,
            key=request_id,
            epoch=1,
            session=self.played.heartbeats[-1].session,
            items=tuple(range(count)),
            count=count,
            reply_to=reply_to,
            nonce=nonce,
            budget_ms=round(budget_s * 1000),
            spec=SandboxSpec(**{"image": "busybox@1", "resources": SMALL, **spec}),
            layers=self.base,
        )

    async def offered(self, offer: Offer) -> OfferReply:
        return await self.bus.request(
            subjects.OFFER, offer, node=self.node, budget_s=5.0, request_id=offer.request_id
        )

    async def confirm(self, offer: Offer, reply: OfferReply) -> None:
        self.played.claims[offer.request_id] = {a.index: a.sandbox_id for a in reply.accepted}
        verdict = self.played.verdict(offer.request_id)
        await self.bus.publish(subjects.VERDICT, verdict, node=self.node)

    async def run(
        self, sandbox_id: str, shell: str, *, budget_s: float = 30.0, **fields: Any
    ) -> ExecDone:
        request = ExecRequest(
            sandbox_id=sandbox_id, exec_id=fields.pop("exec_id", random_name(8)), shell=shell,
            **fields,
        )  # fmt: skip
        return await self.bus.request(
            subjects.EXEC, request, project=PROJECT, node=self.node, budget_s=budget_s
        )

    async def info(self, sandbox_id: str) -> SandboxInfo:
        ask = ById(sandbox_id=sandbox_id)
        return await self.bus.request(
            subjects.INFO, ask, project=PROJECT, node=self.node, budget_s=5.0
        )

    async def stop(self, sandbox_id: str, *, budget_s: float = 20.0) -> SandboxInfo:
        ask = StopSandbox(sandbox_id=sandbox_id)
        return await self.bus.request(
            subjects.STOP, ask, project=PROJECT, node=self.node, budget_s=budget_s
        )

    async def stop_all(self) -> None:
        for items in self.played.claims.values():
            for sandbox_id in items.values():
                with contextlib.suppress(DSecError, NotFound):
                    await self.stop(sandbox_id)

    def leftovers(self) -> dict[str, list[str]]:
        """What the host shows of this node's sandboxes."""
        layout = CgroupLayout.detect(Path("/proc/self/mountinfo").read_text())
        assert self.process is not None
        # What is in the node's mount namespace is seen only from inside it.
        live = Path(f"/proc/{self.process.pid}/root{self.paths.live_dir}")
        files = Path("/sys/block").glob("loop*/loop/backing_file")
        images = [f.read_text() for f in files if f.exists()]
        found = {
            "cgroups": list(NodeCgroups(layout, self.paths).list_ids()),
            "run": [p.name for p in live.iterdir() if SLOT_PATTERN.fullmatch(p.name)],
            "state": [p.name for p in self.paths.sandboxes_dir.glob("*")],
            "loops": [i for i in images if str(self.paths.sandboxes_dir) in i],
            "policies": list(self.played.policies),
        }
        return {name: what for name, what in found.items() if what}


@contextlib.asynccontextmanager
async def edge_world() -> AsyncIterator[EdgeWorld]:
    directory = Path(tempfile.mkdtemp(prefix="dsec-t"))
    paths = NodePaths(f"t{random_name(6)}", directory / "state", directory / "run")
    nats = NatsServer(directory / "nats").start()
    bus = await Bus.connect([nats.url], name="played", inbox_prefix=f"_INBOX.{PROJECT}")
    played = Played(bus, paths.node)
    await played.start()
    reporting = asyncio.create_task(played.report())
    base = make_base(DirectoryStore(directory / "store", Clock()))
    network = f"100.98.{int.from_bytes(os.urandom(1))}.0/24"
    world = EdgeWorld(paths, directory, nats, bus, played, base, network)
    try:
        yield world
    finally:
        if world.process is not None:
            await world.stop_all()
            await world.kill(signal.SIGTERM)
        reporting.cancel()
        await bus.close()
        nats.terminate()
        await asyncio.to_thread(clean_up, world)


def clean_up(world: EdgeWorld) -> None:
    from ipaddress import IPv4Network

    remove_node_namespace(world.paths)
    NodeNetwork(world.paths, IPv4Network(world.network)).remove_gateway()
    layout = CgroupLayout.detect(Path("/proc/self/mountinfo").read_text())
    cgroups = NodeCgroups(layout, world.paths)
    for sandbox_id in cgroups.list_ids():
        cgroup = cgroups.open(sandbox_id)
        cgroup.kill()
        cgroup.wait_empty(timeout_s=10)
        cgroup.remove()
    cgroups.remove()
    empty_trash(world.paths, budget_files=100_000)
    shutil.rmtree(world.directory)
