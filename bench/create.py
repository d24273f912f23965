"""How long a sandbox takes: from `client.create` to its first command's output, and in bursts.

Baseline: `crun run` of the same sentence on an already mounted root. Warm layers, the edge's
journal fsynced, placements on file, tracing at its default sampling.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence

from libdsec import DSecClient, Sandbox
from libdsec.spec import SpecArguments

from .baseline import SENTENCE, Baseline
from .figure import Figure
from .stack import running

IMAGE = "busybox"
SIZE: SpecArguments = {
    "image": IMAGE, "cpus": 0.1, "memory_mib": 64, "disk_mib": 64, "pids": 64,
}  # fmt: skip
N, BURST, BURSTS, SUSTAIN_S, PARALLEL = 200, 100, 3, 10.0, 16


async def one(client: DSecClient) -> tuple[float, float]:
    """Seconds of a create up to the first output, and of the stop."""
    begin = time.perf_counter()
    sandbox = await client.create(**SIZE)
    result = await sandbox.exec(["/bin/echo", SENTENCE])
    took = time.perf_counter() - begin
    if result.stdout.strip() != SENTENCE:
        raise RuntimeError(f"the sandbox printed {result.stdout!r}")
    begin = time.perf_counter()
    await sandbox.stop()
    return took, time.perf_counter() - begin


async def burst(client: DSecClient) -> float:
    """Seconds until BURST sandboxes are ready."""
    begin = time.perf_counter()
    made = await client.create_many(BURST, **SIZE)
    took = time.perf_counter() - begin
    failed = [item for item in made if isinstance(item, BaseException)]
    for sandbox in made:
        if not isinstance(sandbox, BaseException):
            await sandbox.stop()
    if failed:
        raise RuntimeError(f"{len(failed)} of {BURST} failed: {failed[0]}")
    return took


async def sustained(client: DSecClient) -> tuple[float, float]:
    """Creates and stops per second, PARALLEL at once, for SUSTAIN_S."""
    ids: list[Sandbox] = []
    end = time.perf_counter() + SUSTAIN_S

    async def creator() -> None:
        while time.perf_counter() < end and len(ids) < 1000:
            ids.append(await client.create(**SIZE))

    begin = time.perf_counter()
    await asyncio.gather(*(creator() for _ in range(PARALLEL)))
    creating = time.perf_counter() - begin
    begin = time.perf_counter()
    limit = asyncio.Semaphore(PARALLEL)

    async def stop(sandbox: Sandbox) -> None:
        async with limit:
            await sandbox.stop()

    await asyncio.gather(*(stop(s) for s in ids))
    return len(ids) / creating, len(ids) / (time.perf_counter() - begin)


async def measure() -> list[Figure]:
    with Baseline() as crun:
        async with running() as client:
            for _ in range(20):  # warm: layers mounted, pools filled, code paths imported
                await one(client)
                crun.run()
            creates, stops, bare = [], [], []
            for _ in range(N):
                bare.append(crun.run())
                created, stopped = await one(client)
                creates.append(created)
                stops.append(stopped)
            pairs = [(crun.burst(BURST, BURST), await burst(client)) for _ in range(BURSTS)]
            create_rate, stop_rate = await sustained(client)
            mode = next(iter(client_modes(await client.nodes())), "unknown")
    base = statistics.median(bare) * 1e3
    note = f"disk limit: {mode}; journal fsynced; PLACEMENTS on file; 1 % sampled"
    quantile = statistics.quantiles(creates, n=100)[98] * 1e3
    return [
        Figure(
            "create_p50_ms", statistics.median(creates) * 1e3, "ms", base, N, "ratio <= 3", note
        ),
        Figure("create_p99_ms", quantile, "ms", base, N),
        Figure(
            "create_burst100_s", statistics.median(b for _, b in pairs), "s",
            statistics.median(a for a, _ in pairs), BURSTS, "ratio <= 2", note,
        ),
        Figure("stop_p50_ms", statistics.median(stops) * 1e3, "ms", None, N),
        Figure("creates_per_s", create_rate, "1/s", None, int(create_rate * SUSTAIN_S)),
        Figure("stops_per_s", stop_rate, "1/s", None, int(create_rate * SUSTAIN_S)),
    ]  # fmt: skip


def client_modes(nodes: Sequence[object]) -> list[str]:
    """The disk-limit modes that the nodes state."""
    return [
        capability.removeprefix("disk=")
        for node in nodes
        for capability in node.heartbeat.capabilities  # type: ignore[attr-defined]
        if capability.startswith("disk=")
    ]


def run(rest: Sequence[str], *, quiet: bool) -> list[Figure]:
    """Figures of creates; `quiet` keeps the remarks to standard error."""
    if not quiet:
        print("creates against bare crun, alternated; about two minutes", file=sys.stderr)
    return asyncio.run(measure())
