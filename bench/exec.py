"""The round trip of a command that does nothing, through NATS and the edge, against `crun exec`."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence

from .baseline import Baseline
from .create import SIZE
from .figure import Figure
from .stack import running

N, WARM = 1000, 50


async def measure() -> list[Figure]:
    with Baseline() as crun:
        async with running() as client:
            sandbox = await client.create(**SIZE)
            ours, bare = [], []
            for i in range(N + WARM):
                begin = time.perf_counter()
                result = await sandbox.exec(["/bin/true"])
                took = time.perf_counter() - begin
                if result.exit_code != 0:
                    raise RuntimeError(f"true ended with {result.exit_code}")
                base = crun.exec()
                if i >= WARM:
                    ours.append(took)
                    bare.append(base)
            await sandbox.stop()
    base = statistics.median(bare) * 1e3
    p99 = statistics.quantiles(ours, n=100)[98] * 1e3
    return [
        Figure("exec_p50_ms", statistics.median(ours) * 1e3, "ms", base, N, "ratio <= 0.6"),
        Figure("exec_p99_ms", p99, "ms", statistics.quantiles(bare, n=100)[98] * 1e3, N),
    ]


def run(rest: Sequence[str], *, quiet: bool) -> list[Figure]:
    if not quiet:
        print("exec of true against crun exec, alternated; half a minute", file=sys.stderr)
    return asyncio.run(measure())
