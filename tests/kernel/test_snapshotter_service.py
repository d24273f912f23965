"""Snapshotters as the processes they are: several per node, killed at any moment."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from libdsec.bus import Bus, Call
from libdsec.errors import Conflict, DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from libdsec.wire import subjects
from libdsec.wire.ids import new_incarnation, new_sandbox_id
from libdsec.wire.snapshot import FreezeRequest, Frozen, SnapshotterHealth, ThawRequest
from libhost.cgroup import SandboxCgroup

from ..integration.servers import NatsServer
from .paused import Cgroups, Counter, Holder, node_cgroups, silent_file_system, start_blocked

pytestmark = pytest.mark.kernel

MIB = 1 << 20


class Workers:
    """The snapshotters of one node and a caller that stands for its edge."""

    def __init__(self, cgroups: Cgroups, server: NatsServer, bus: Bus, directory: Path) -> None:
        self.cgroups = cgroups
        self.bus = bus
        self._server = server
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self.health: asyncio.Queue[SnapshotterHealth] = asyncio.Queue()

    async def on_health(self, health: SnapshotterHealth, _call: Call) -> None:
        self.health.put_nowait(health)

    async def start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "DSEC_NODE": self.cgroups.node,
            "DSEC_NATS_SERVERS": f'["{self._server.url}"]',
            "DSEC_STATE_DIR": str(self.cgroups.paths.state_dir),
            "DSEC_RUN_DIR": str(self.cgroups.paths.run_dir),
            "DSEC_HTTP_PORT": "0",
            "DSEC_HTTP_PORT_FILE": str(self._directory / "port"),
        }
        log = (self._directory / f"snapshotter-{len(self._processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.snapshotter"], env=environment, stdout=log,
                stderr=log,
            )  # fmt: skip
        self._processes.append(process)
        while not self.health.empty():
            self.health.get_nowait()
        async with asyncio.timeout(20):
            await self.health.get()
        return process

    def metrics(self) -> str:
        """Of the worker that started last."""
        port = (self._directory / "port").read_text()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read(), "utf-8")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(10)

    async def freeze(
        self, cgroup: SandboxCgroup, *, reclaim: bool = True, deadline_s: float = 10.0
    ) -> Frozen:
        request = FreezeRequest(
            sandbox_id=cgroup.sandbox_id, lane="be", reclaim=reclaim, deadline_s=deadline_s
        )
        return await self.bus.request(
            subjects.SNAPSHOT_FREEZE, request, node=self.cgroups.node, budget_s=deadline_s + 1
        )

    async def thaw(self, sandbox_id: str) -> None:
        request = ThawRequest(sandbox_id=sandbox_id, lane="be")
        await self.bus.request(subjects.SNAPSHOT_THAW, request, node=self.cgroups.node, budget_s=5)


@pytest.fixture
def cgroups(tmp_path: Path) -> Iterator[Cgroups]:
    with node_cgroups(tmp_path) as cgroups:
        yield cgroups


@pytest.fixture
async def workers(cgroups: Cgroups, tmp_path: Path) -> AsyncIterator[Workers]:
    server = NatsServer(tmp_path / "nats", jetstream=False).start()
    bus = await Bus.connect([server.url], name="edge")
    workers = Workers(cgroups, server, bus, tmp_path)
    await bus.subscribe(subjects.SNAPSHOT_HEALTH, workers.on_health, node=cgroups.node)
    yield workers
    workers.close()
    await bus.close()
    server.terminate()


async def went_on(counter: Counter) -> bool:
    before = counter.value
    for _ in range(400):
        if counter.value > before:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_pause_and_a_resume_through_the_bus(workers: Workers, tmp_path: Path) -> None:
    await workers.start()
    cgroup = workers.cgroups.sandbox()
    counter = Counter(workers.cgroups, cgroup, tmp_path / "count")
    frozen = await workers.freeze(cgroup)
    assert cgroup.is_frozen()
    assert frozen.how in ("memory_reclaim", "pageout", "file_only")
    assert frozen.resident_bytes > 0
    await workers.thaw(cgroup.sandbox_id)
    await workers.thaw(cgroup.sandbox_id)
    assert await went_on(counter)
    metrics = await asyncio.to_thread(workers.metrics)
    assert 'dsec_snapshotter_pauses_total{outcome="ok"} 1.0' in metrics
    assert "dsec_snapshotter_freeze_seconds_count 1.0" in metrics
    assert "dsec_snapshotter_prefetch_seconds_count 2.0" in metrics


async def test_what_cannot_be_paused_is_a_typed_refusal(workers: Workers, tmp_path: Path) -> None:
    await workers.start()
    node = workers.cgroups.node
    gone = new_sandbox_id(node, new_incarnation())
    with pytest.raises(NotFound, match=gone):
        await workers.thaw(gone)
    with pytest.raises(InvalidArgument, match="does not belong to node"):
        await workers.thaw(new_sandbox_id("elsewhere", new_incarnation()))
    with pytest.raises(InvalidArgument, match="is not valid"):
        await workers.thaw("../../../../tmp")
    cgroup = workers.cgroups.sandbox()
    counter = Counter(workers.cgroups, cgroup, tmp_path / "count")
    with silent_file_system(tmp_path / "silent") as mount_point:
        blocked = start_blocked(workers.cgroups, cgroup, mount_point)
        with pytest.raises(Conflict, match=f"process {blocked.pid} "):
            await workers.freeze(cgroup, deadline_s=1.0)
        assert await went_on(counter)
        blocked.kill()
        blocked.wait(10)


async def test_a_worker_killed_at_any_moment_leaves_what_the_edge_can_thaw(
    workers: Workers, tmp_path: Path
) -> None:
    cgroup = workers.cgroups.sandbox()
    counter = Counter(workers.cgroups, cgroup, tmp_path / "count")
    file = tmp_path / "file"
    file.write_bytes(os.urandom(32 * MIB))
    holder = Holder(workers.cgroups, cgroup, file, 32 * MIB)
    chance = random.Random(7)
    for _ in range(3):
        worker = await workers.start()
        request = asyncio.create_task(workers.freeze(cgroup, deadline_s=1.0))
        await asyncio.sleep(chance.uniform(0, 0.03))
        worker.kill()
        worker.wait(10)
        outcome, *_ = await asyncio.gather(request, return_exceptions=True)
        assert isinstance(outcome, Frozen | Unavailable | DeadlineExceeded)
        cgroup.thaw()
        assert await went_on(counter)
        assert holder.is_whole()


async def test_of_two_workers_one_takes_over_and_a_drained_one_finishes(
    workers: Workers, tmp_path: Path
) -> None:
    first, _ = await workers.start(), await workers.start()
    cgroup = workers.cgroups.sandbox()
    counter = Counter(workers.cgroups, cgroup, tmp_path / "count")
    await asyncio.gather(*(workers.freeze(cgroup) for _ in range(8)))
    first.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(first.wait, 20) == 0
    for _ in range(4):
        await workers.thaw(cgroup.sandbox_id)
        assert await went_on(counter)
        await workers.freeze(cgroup)
