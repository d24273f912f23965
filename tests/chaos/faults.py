"""One round: creates under way while an edge dies at a point and something else happens as well."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from libdsec import DSecClient, DSecError, Network, Policy, Sandbox
from libdsec.wire.model import random_token
from services.edge.fault import Point
from tests.stack import IMAGE, SMALL, Stack

from .processes import Disturbance, RestartError, disturbances, pid_of, restart

CREATES = 50
LABEL = "faults"
_SPREAD_S = 1.5  # within it the creates begin
_BUDGET_S = 60.0
# At which pass by the point an edge dies.
_SOON, _LATE = (1, 5), (4, 10)
_FOR_EVER_S = 86_400.0
_ONCE = "echo ran >> /ran; wc -l < /ran"


@dataclass
class Round:
    """What became of the requests of one round."""

    point: Point
    seed: int
    disturbance: Disturbance
    died: set[str] = field(default_factory=set)  # nodes whose edge came by the point
    took_s: float = 0.0
    sandboxes: list[Sandbox] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)  # whose stop was not answered
    errors: list[DSecError] = field(default_factory=list)  # of creates
    refused: list[DSecError] = field(default_factory=list)  # of what came after
    findings: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.point}/{self.seed}"

    @property
    def codes(self) -> dict[str, int]:
        return dict(Counter(err.code for err in self.errors))


async def play(stack: Stack, client: DSecClient, point: Point, seed: int) -> Round:
    """Run one round; what must hold afterwards is judged two leases later (see `audit`).

    Raises:
        TimeoutError: an edge that was restarted does not come back into service.
    """
    rng = random.Random(f"{point}/{seed}")
    nodes = rng.sample(stack.node_names, len(stack.node_names))
    happening = disturbances(nodes[-1])
    turn = (list(Point).index(point) + seed) % len(happening)
    done = Round(point, seed, happening[turn])
    # Which node the creates go to is not ours to say, so each edge is armed, the first to die soon.
    armed = {
        node: await _arm(stack, client, node, f"{point}:kill:{rng.randint(*passes)}", done)
        for node, passes in zip(nodes, (_SOON, *[_LATE] * len(nodes)), strict=False)
    }
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(_disturb(stack, done, rng.uniform(0.2, 1.2)))
        for _ in range(CREATES):
            group.create_task(_create_one(client, random.Random(rng.random()), done))
    for node, pid in armed.items():
        if await pid_of(stack, f"edge-{node}") != pid:
            done.died.add(node)
    for sandbox in done.sandboxes:
        if sandbox.id in done.unsure:
            await sandbox.stop()
    done.took_s = time.monotonic() - began
    return done


async def _arm(stack: Stack, client: DSecClient, node: str, fault: str, done: Round) -> int:
    """Restart an edge so that it dies at a point, and see it back in service; its pid."""
    edge, before = f"edge-{node}", await _session(client, node)
    try:
        await restart(stack, edge, {"DSEC_FAULT": fault})
    except RestartError:
        done.died.add(node)  # it came by while it took over from its predecessor
    armed = await pid_of(stack, edge)
    async with asyncio.timeout(_BUDGET_S):
        while await _session(client, node) in (before, ""):
            await asyncio.sleep(0.1)
    return armed


async def _session(client: DSecClient, node: str) -> str:
    """Of the edge that schedulers believe takes sandboxes on the node now; "" for none."""
    try:
        views = await client.nodes()
    except DSecError:  # the scheduler is not back yet
        return ""
    for view in views:
        if view.heartbeat.node == node and view.state == "live" and view.heartbeat.policy_ready:
            return view.heartbeat.session
    return ""


async def _disturb(stack: Stack, done: Round, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await done.disturbance.happen(stack)


async def _create_one(client: DSecClient, rng: random.Random, done: Round) -> None:
    """A create at a random moment, a command in what it gave, and half of them stopped again."""
    await asyncio.sleep(rng.uniform(0, _SPREAD_S))
    network = Network.allow(rules=["tcp:10.9.8.7:443"]) if rng.random() < 0.3 else Network.none()
    try:
        sandbox = await client.create(
            image=IMAGE, **SMALL, labels={"job": LABEL}, policy=Policy(network=network),
            idle_timeout_s=_FOR_EVER_S, max_lifetime_s=_FOR_EVER_S, timeout=_BUDGET_S,
        )  # fmt: skip
    except DSecError as err:
        done.errors.append(err)
        return
    except Exception as err:
        done.findings.append(f"untyped {type(err).__name__} from create: {err}")
        return
    done.sandboxes.append(sandbox)
    try:
        await _use(sandbox, done)
        if rng.random() < 0.5:
            done.stopped.add(sandbox.id)
            done.unsure.add(sandbox.id)
            await sandbox.stop()
            done.unsure.discard(sandbox.id)
    except DSecError as err:
        done.refused.append(err)
    except Exception as err:
        done.findings.append(f"untyped {type(err).__name__} in {sandbox.id}: {err}")


async def _use(sandbox: Sandbox, done: Round) -> None:
    """A command that would show if it ran twice."""
    result = await sandbox.exec(_ONCE, exec_id=random_token(), timeout=30)
    if (result.exit_code, result.stdout.strip()) != (0, "1"):
        done.findings.append(f"{sandbox.id}: ran {result.stdout!r} times, code {result.exit_code}")
