"""Two leases later: what callers were told, what the edges say and what the host holds agree."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from libdsec import DSecClient, DSecError
from libdsec.wire.defaults import LEASE_S
from libdsec.wire.sandbox import SandboxInfo, State
from tests.stack import Stack

from . import host
from .faults import LABEL, Round
from .processes import pid_of

SETTLE_S = 2 * LEASE_S
_LIST_S = 30.0


async def audit(stack: Stack, client: DSecClient, rounds: Sequence[Round]) -> list[str]:
    """Everything that does not hold, in words. Call it SETTLE_S after the last round."""
    try:
        listed = await _everything(client)
    except TimeoutError:
        return [f"not every node answers `list` within {_LIST_S:.0f} s: {await _nodes(client)}"]
    alive = {info.sandbox_id: info for info in listed if info.state is not State.DEAD}
    findings = [f"{r.name}: {finding}" for r in rounds for finding in r.findings]
    findings += judge_requests(rounds, [i for i in alive.values() if i.labels.get("job") == LABEL])
    for node in stack.node_names:
        census = host.take(stack, node, await pid_of(stack, f"edge-{node}"))
        findings += census.differences([i for i, info in alive.items() if info.node == node])
        findings += await _layers(stack, node)
    return findings


async def clear(client: DSecClient) -> list[str]:
    """Stop what the rounds have left, so that the next ones have room."""
    outcome = await client.stop_many(labels={"job": LABEL})
    findings = [f"{i} was not stopped: {why}" for i, why in outcome.failed.items()]
    left = [info.sandbox_id async for info in client.list(labels={"job": LABEL})]
    return findings + [f"{i} was stopped but is listed" for i in left]


async def _everything(client: DSecClient) -> list[SandboxInfo]:
    """All sandboxes, from all nodes."""
    async with asyncio.timeout(_LIST_S):
        while True:
            listing = client.list()
            try:
                found = [info async for info in listing]
            except DSecError:
                found = []
            covered = listing.coverage
            if (
                covered.answered
                and covered.nodes_known
                and not covered.missing | set(covered.failed)
            ):
                return found
            await asyncio.sleep(0.5)


async def _nodes(client: DSecClient) -> str:
    try:
        views = await client.nodes()
    except DSecError as err:
        return str(err)
    return ", ".join(f"{view.heartbeat.node} is {view.state}" for view in views)


def judge_requests(rounds: Sequence[Round], alive: Sequence[SandboxInfo]) -> list[str]:
    """Each request has one sandbox, or one error and none."""
    told = {s.id: r.name for r in rounds for s in r.sandboxes}
    stopped = {i for r in rounds for i in r.stopped}
    living = {info.sandbox_id for info in alive}
    counts = Counter(info.request_id for info in alive)
    failed = {err.request_id: r.name for r in rounds for err in r.errors}
    return [
        *(f"{n} sandboxes for request {request}: "
          f"{' '.join(i.sandbox_id for i in alive if i.request_id == request)}"
          for request, n in counts.items() if n > 1),
        *(f"{i.sandbox_id} of request {i.request_id} lives though its caller was told of "
          f"{'an error' if i.request_id in failed else 'nothing'}"
          for i in alive if i.sandbox_id not in told),
        *(f"{told[i]}: {i} was stopped but lives" for i in sorted(stopped & living)),
        *(f"{told[i]}: {i} is gone" for i in sorted(set(told) - stopped - living)),
    ]  # fmt: skip


async def _layers(stack: Stack, node: str) -> list[str]:
    mounts = host.layer_mounts(await pid_of(stack, f"edge-{node}"))
    return [f"{node}: layer {d[:12]} is mounted {n} times" for d, n in mounts.items() if n > 1]
