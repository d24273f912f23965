"""Many rounds on one stack, with counters that count all the while."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from libdsec import DSecClient, DSecError
from services.edge.fault import Point
from tests.stack import Stack

from .audit import SETTLE_S, audit, clear
from .counters import check_all, outputs_are_whole, start_counters
from .faults import Round, play

LABEL = "counters"
_REQUEST = re.compile(r"request ([0-9a-f]{24})")
_TRACES_KEPT = 20

Tell = Callable[[str], None]


@dataclass
class Campaign:
    rounds: list[Round] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


async def run(
    stack: Stack,
    client: DSecClient,
    plan: Sequence[tuple[Point, int]],
    *,
    counters: int,
    batch: int,
    tell: Tell,
) -> Campaign:
    """Play (point, seed) after (point, seed); after each `batch` of them look whether all holds."""
    tell(f"starting {counters} counters")
    counting = await start_counters(client, counters, LABEL)
    campaign = Campaign()
    for first in range(0, len(plan), batch):
        rounds = []
        for point, seed in plan[first : first + batch]:
            try:
                rounds.append(await play(stack, client, point, seed))
            except (TimeoutError, DSecError) as err:
                campaign.findings.append(f"{point}/{seed} cannot be played: {err!r}")
                return campaign
            tell(f"round {len(campaign.rounds) + len(rounds)} of {len(plan)}: {say(rounds[-1])}")
        campaign.rounds += rounds
        await asyncio.sleep(SETTLE_S)
        found = await audit(stack, client, rounds) + await check_all(counting)
        await _keep_traces(stack, found)
        found += await clear(client)
        campaign.findings += found
        tell(f"two leases later: {len(found)} findings" + "".join(f"\n    {f}" for f in found))
    campaign.findings += await outputs_are_whole(counting)
    await client.stop_many(labels={"job": LABEL})
    return campaign


async def _keep_traces(stack: Stack, found: Sequence[str]) -> None:
    """What became of the requests that are named in findings, beside the services' logs."""
    requests = sorted({request for text in found for request in _REQUEST.findall(text)})
    for request in requests[:_TRACES_KEPT]:
        traced = await asyncio.to_thread(stack.dsec, "trace", request)
        (stack.paths.log / f"trace-{request}.txt").write_text(traced.stdout + traced.stderr)


def say(done: Round) -> str:
    died = f"{', '.join(sorted(done.died)) or 'no edge'} died"
    return (
        f"{done.name}: {died}, {done.disturbance}; {len(done.sandboxes)} sandboxes, "
        f"{len(done.errors)} errors {done.codes or ''} in {done.took_s:.1f} s"
        + "".join(f"\n    {err.code}: {err}" for err in (*done.errors, *done.refused))
    )
