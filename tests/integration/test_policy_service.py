"""The policy service as a process, asked over a real bus, enforcing in a real kernel.

Everything runs in a router namespace of the test's own: the bus, the service, and this process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from libdsec.bus import Bus, Call
from libdsec.errors import Conflict, NotFound, Unsupported
from libdsec.wire import subjects
from libdsec.wire.policy import (
    ApplyPolicy,
    AuditPolicy,
    CheckPolicy,
    PolicyHealth,
    ReconcilePolicy,
    RemovePolicy,
)
from libdsec.wire.sandbox import NetworkAllow, NetworkNone, NetworkSpec, PolicySpec

from ..kernel import sandnet
from ..kernel.sandnet import OTHER, OUTSIDE, Sandbox, World
from .servers import NatsServer

ROOT = Path(__file__).parents[2]
ALIASES = f"""
[services.mirror]
rules = ["tcp:{OUTSIDE}:80"]
env = {{ MIRROR = "http://mirror" }}
hosts = {{ mirror = "{OUTSIDE}" }}
"""
MIRROR = NetworkAllow(services=("mirror",))


class PolicyProcess:
    """The service, started and ended by its pid; what it says goes to a file."""

    def __init__(self, world: World, nats_url: str, aliases: Path) -> None:
        self.log = world.paths.run_dir.parent / "policy.log"
        self.environment = {
            "PATH": os.environ["PATH"],
            "DSEC_NODE": world.paths.node,
            "DSEC_STATE_DIR": str(world.paths.state_dir),
            "DSEC_RUN_DIR": str(world.paths.run_dir),
            "DSEC_NATS_SERVERS": f'["{nats_url}"]',
            "DSEC_HTTP_PORT": "0",
            "DSEC_ALIAS_FILE": str(aliases),
            "DSEC_BPF_OBJECT": str(sandnet.OBJECT),
            "DSEC_HEALTH_INTERVAL_S": "0.1",
        }
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "services.policy"],
                cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def end(self, number: int) -> int:
        child, self._child = self._child, None
        if child is None:
            return 0
        child.send_signal(number)
        return child.wait(20)

    def run_to_the_end(self) -> int:
        self.start()
        return self.wait()

    def wait(self) -> int:
        """Until it ends by itself."""
        assert self._child is not None
        return self._child.wait(20)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    sandnet.require()
    with sandnet.world(tmp_path) as made:
        for address in (OUTSIDE, OTHER):
            made.outside.serve(kind="tcp", address=address, port=80)
        yield made


@pytest.fixture
def nats_server(world: World, tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats").start()
    yield server
    server.terminate()


@pytest.fixture
def aliases(tmp_path: Path) -> Path:
    path = tmp_path / "aliases.toml"
    path.write_text(ALIASES)
    return path


class Node:
    """The edge's part: it asks, and listens to the service's health."""

    def __init__(self, world: World, bus: Bus, process: PolicyProcess) -> None:
        self.world = world
        self.bus = bus
        self.process = process
        self._heard: asyncio.Queue[PolicyHealth] = asyncio.Queue()

    async def on_health(self, health: PolicyHealth, _call: Call) -> None:
        self._heard.put_nowait(health)

    async def healthy(self, *, reason: str = "", ready: bool = True) -> PolicyHealth:
        """The next report that says so and gives this reason, or none."""
        async with asyncio.timeout(20):
            while True:
                health = await self._heard.get()
                if health.ready is ready and (
                    reason in health.reason if reason else not health.reason
                ):
                    return health

    async def restart(self, number: int, *, reason: str = "", ready: bool = True) -> None:
        self.process.end(number)
        # What the old process said may still be on its way: a round trip to the server brings it.
        last = PolicyHealth(ready=False, reason="ended")
        await self.bus.publish(
            subjects.POLICY_HEALTH, last, node=self.world.paths.node, confirm=True
        )
        while not self._heard.empty():
            self._heard.get_nowait()
        self.process.start()
        await self.healthy(reason=reason, ready=ready)

    async def ask(self, rpc: Any, message: Any) -> Any:
        return await self.bus.request(rpc, message, node=self.world.paths.node, budget_s=10)

    async def apply(
        self, sandbox: Sandbox, generation: int, network: NetworkSpec, *paths: str
    ) -> Any:
        return await self.ask(
            subjects.POLICY_APPLY,
            ApplyPolicy(
                sandbox_id=sandbox.sandbox_id,
                generation=generation,
                policy=PolicySpec(network=network, protected_paths=paths),
                cgroup_id=sandbox.cgroup_id,
                ifindex=sandbox.ifindex or None,
                address=str(sandbox.address) if sandbox.address else None,
                netns_path=f"/proc/{sandbox.process.pid}/ns/net",
            ),
        )


@pytest.fixture
async def node(
    world: World, nats_server: NatsServer, bus: Bus, aliases: Path
) -> AsyncIterator[Node]:
    process = PolicyProcess(world, nats_server.url, aliases)
    node = Node(world, bus, process)
    await bus.subscribe(subjects.POLICY_HEALTH, node.on_health, node=world.paths.node)
    process.start()
    try:
        await node.healthy()
        yield node
    finally:
        process.end(signal.SIGTERM)


def reachable(sandbox: Sandbox) -> set[str]:
    peers = (OUTSIDE, OTHER)
    return {p for p in peers if sandbox.process.connect(address=p, port=80) != "EPERM"}


async def test_policy_is_in_force_when_the_answer_is_there(node: Node) -> None:
    sandbox = node.world.sandbox()
    answer = await node.apply(sandbox, 1, MIRROR)
    assert reachable(sandbox) == {OUTSIDE}
    assert answer.generation == 1
    assert answer.env == {"MIRROR": "http://mirror"}
    assert answer.hosts == {"mirror": OUTSIDE}


async def test_health_names_the_mechanisms(node: Node) -> None:
    health = await node.healthy()
    assert health.mechanisms[0] == "network"
    assert health.mechanisms[1] in {"link=tcx", "link=clsact"}


async def test_refusals_are_typed_and_say_the_way_out(node: Node, aliases: Path) -> None:
    sandbox = node.world.sandbox()
    with pytest.raises(NotFound, match="'crates'") as unknown:
        await node.apply(sandbox, 1, NetworkAllow(services=("crates",)))
    assert "[services.crates]" in unknown.value.hint
    with pytest.raises(Unsupported, match="/tests"):
        await node.apply(sandbox, 1, NetworkNone(), "/tests/**")
    policy = PolicySpec(network=NetworkAllow(services=("crates",)))
    with pytest.raises(NotFound, match="'crates'"):
        await node.ask(subjects.POLICY_CHECK, CheckPolicy(policy=policy))
    aliases.unlink()
    await node.restart(signal.SIGTERM, reason="No such file")
    with pytest.raises(Unsupported, match=str(aliases)):
        await node.apply(sandbox, 1, MIRROR)


async def test_alias_file_is_read_again_and_a_broken_one_is_told(node: Node, aliases: Path) -> None:
    aliases.write_text("[")
    await node.healthy(reason="it is not valid")
    sandbox = node.world.sandbox()
    await node.apply(sandbox, 1, MIRROR)
    aliases.write_text(ALIASES.replace("services.mirror", "services.other"))
    await node.healthy()
    await node.apply(sandbox, 2, NetworkAllow(services=("other",)))
    with pytest.raises(NotFound):
        await node.apply(sandbox, 3, MIRROR)
    assert reachable(sandbox) == {OUTSIDE}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_policy_outlives_the_service_and_is_adopted(node: Node, number: int) -> None:
    sandbox = node.world.sandbox()
    await node.apply(sandbox, 7, MIRROR)
    node.process.end(number)
    assert reachable(sandbox) == {OUTSIDE}
    await node.restart(number)
    assert reachable(sandbox) == {OUTSIDE}
    audit = await node.ask(subjects.POLICY_AUDIT, AuditPolicy(sandbox_id=sandbox.sandbox_id))
    assert [(d.target, d.count) for d in audit.denials] == [(f"tcp {OTHER}:80", 2)]
    assert (await node.apply(sandbox, 7, MIRROR)).generation == 7
    with pytest.raises(Conflict):
        await node.apply(sandbox, 6, NetworkNone())


async def test_switch_ends_the_flows_it_denies(node: Node) -> None:
    sandbox = node.world.sandbox()
    await node.apply(sandbox, 1, NetworkAllow(services=("mirror",), rules=(f"tcp:{OTHER}:80",)))
    kept = sandbox.process.connect(address=OUTSIDE, port=80)
    ended = sandbox.process.connect(address=OTHER, port=80)
    await node.apply(sandbox, 2, MIRROR)
    assert sandbox.process.read(handle=ended, timeout_s=5) == "ECONNABORTED"
    assert sandbox.process.talk(handle=kept, text="on") == "ON"


async def test_removal_and_reconciliation(node: Node) -> None:
    one, two = node.world.sandbox(), node.world.sandbox()
    for sandbox in (one, two):
        await node.apply(sandbox, 1, MIRROR)
    await node.ask(subjects.POLICY_REMOVE, RemovePolicy(sandbox_id=one.sandbox_id))
    assert reachable(one) == set()
    await node.restart(signal.SIGKILL)
    listed = ReconcilePolicy(sandbox_ids=(one.sandbox_id,))
    reconciled = await node.ask(subjects.POLICY_RECONCILE, listed)
    assert (reconciled.removed, reconciled.missing) == (1, (one.sandbox_id,))
    assert reachable(two) == set()


async def test_host_that_cannot_enforce_says_why_and_starts_nothing(node: Node) -> None:
    node.process.environment["DSEC_BPF_OBJECT"] = "/nowhere/policy.bpf.o"
    await node.restart(signal.SIGTERM, reason="/nowhere/policy.bpf.o is not there", ready=False)
    sandbox = node.world.sandbox(link=False)
    with pytest.raises(Unsupported, match=r"/nowhere/policy\.bpf\.o"):
        await node.apply(sandbox, 1, NetworkNone())
    assert sandbox.process.socket(family=2, kind=1) == "EPERM", "the old programs still hold"


async def test_what_the_kernel_refused_once_is_tried_again(node: Node, tmp_path: Path) -> None:
    """It says why for a while, and ends: whoever supervises it starts the next try."""
    damaged = tmp_path / "policy.bpf.o"
    damaged.write_bytes(b"\x7fELF" + bytes(100))
    node.process.environment |= {"DSEC_BPF_OBJECT": str(damaged), "DSEC_RETRY_OPEN_S": "0.5"}
    await node.restart(signal.SIGTERM, reason="policy.bpf.o", ready=False)
    assert await asyncio.to_thread(node.process.wait) != 0
    node.process.environment |= {"DSEC_BPF_OBJECT": str(sandnet.OBJECT)}
    node.process.start()
    await node.healthy()


async def test_second_service_of_a_node_refuses_to_start(
    node: Node, nats_server: NatsServer, aliases: Path
) -> None:
    second = PolicyProcess(node.world, nats_server.url, aliases)
    assert second.run_to_the_end() == 3
    assert "one policy service per node" in second.log.read_text()
