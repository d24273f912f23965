"""`python -m tests.chaos`: the long fault runs, with a table of every round.

Brings a stack of two nodes up, runs every fault point with every seed while counters count, then
kills edges for some minutes, and takes everything away. Ends with 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from libdsec import DSecClient
from services.edge.fault import Point
from tests.leftovers import left_on_host
from tests.stack import Stack, running_stack

from . import campaign, restarts
from .campaign import Campaign
from .faults import Round
from .restarts import Restarts

BATCH = 5  # rounds between two audits

note = Console(stderr=True, highlight=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="rounds per fault point")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--points", nargs="*", default=list(Point), choices=list(Point))
    parser.add_argument("--minutes", type=float, default=10.0, help="of edge restarts")
    parser.add_argument("--counters", type=int, default=50, help="sandboxes that count meanwhile")
    parser.add_argument("--logs", type=Path, help="a directory to copy the services' logs to")
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    return parser.parse_args()


async def everything(stack: Stack, options: argparse.Namespace) -> tuple[Campaign, Restarts]:
    began = time.monotonic()

    def tell(text: str) -> None:
        note.print(f"[{time.monotonic() - began:6.0f} s] {text}", markup=False)

    seeds = range(options.first_seed, options.first_seed + options.seeds)
    plan = [(Point(point), seed) for point in options.points for seed in seeds]
    async with DSecClient(context=stack.context) as client:
        faults, loop = Campaign(), Restarts()
        if plan:
            faults = await campaign.run(
                stack, client, plan, counters=options.counters, batch=BATCH, tell=tell
            )
        if options.minutes > 0:
            loop = await restarts.run(
                stack, client, 60 * options.minutes, options.first_seed,
                counters=options.counters, tell=tell,
            )  # fmt: skip
    return faults, loop


def show(console: Console, faults: Campaign, loop: Restarts) -> None:
    if faults.rounds:
        console.print(_table(faults.rounds))
    if loop.restarts:
        deaths = ", ".join(f"{n} {reason}" for reason, n in sorted(loop.deaths.items()))
        console.print(
            f"edge restarts: {loop.restarts}, ready again after "
            f"{statistics.median(loop.ready_s):.1f} s (median), {max(loop.ready_s):.1f} s (most); "
            f"deaths told rightly: {deaths}"
        )
    for finding in (*faults.findings, *loop.findings):
        console.print(f"DOES NOT HOLD: {finding}", style="red", markup=False)


def _table(rounds: Sequence[Round]) -> Table:
    table = Table("point", "seed", "edges died", "besides", "creates", "sandboxes", "errors",
                  "stopped", "seconds")  # fmt: skip
    for done in rounds:
        errors = " ".join(f"{n} {code}" for code, n in sorted(done.codes.items()))
        table.add_row(
            done.point.value, str(done.seed), " ".join(sorted(done.died)) or "none",
            str(done.disturbance), str(len(done.sandboxes) + len(done.errors)),
            str(len(done.sandboxes)), errors or "0", str(len(done.stopped)),
            f"{done.took_s:.1f}",
        )  # fmt: skip
    return table


def document(faults: Campaign, loop: Restarts) -> dict[str, object]:
    return {
        "rounds": [
            {
                "point": r.point.value, "seed": r.seed, "died": sorted(r.died),
                "besides": str(r.disturbance), "sandboxes": len(r.sandboxes), "errors": r.codes,
                "stopped": len(r.stopped), "seconds": round(r.took_s, 1),
            }
            for r in faults.rounds
        ],
        "restarts": loop.restarts,
        "ready_s": [round(s, 2) for s in loop.ready_s],
        "deaths": dict(loop.deaths),
        "findings": [*faults.findings, *loop.findings],
    }  # fmt: skip


def main() -> int:
    options = arguments()
    with running_stack(prefix="dsec-chaos-") as stack:
        _ = stack.description
        try:
            faults, loop = asyncio.run(everything(stack, options))
        finally:
            if options.logs:
                shutil.copytree(stack.paths.log, options.logs, dirs_exist_ok=True)
    loop.findings += [f"left on the host: {what}" for what in left_on_host(stack)]
    if options.json:
        print(json.dumps(document(faults, loop)))
    else:
        show(Console(width=150) if not sys.stdout.isatty() else Console(), faults, loop)
    return 1 if faults.findings or loop.findings else 0


if __name__ == "__main__":
    sys.exit(main())
