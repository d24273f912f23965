"""One round: creates under way while an edge dies at a point and another service is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libdsec import DSecClient, DSecError, Sandbox
from services.edge.fault import Point
from services.stack.control import ask_control
from services.stack.layout import StackPaths
from services.stack.up import status
from tests.stack import IMAGE, SMALL, Stack

CREATES = 50
OUTAGE_S = 10.0
BUDGET_S = 60.0
POINTS = tuple(Point)
VICTIMS = ("scheduler", "policy-n1", "snapshotter-n2", "burst", "nats-n1")
OUTAGES = ("nats-hub", "valkey")


@dataclass
class Round:
    """What became of the requests of one round."""

    point: str
    seed: int
    victim: str = ""
    sandboxes: list[Sandbox] = field(default_factory=list)
    errors: list[DSecError] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)


async def play(stack: Stack, client: DSecClient, point: Point, seed: int) -> Round:
    """Run one round; the caller audits after two leases."""
    rng = random.Random(f"{point}/{seed}")
    done = Round(point, seed)
    await arm(stack, rng.choice(stack.node_names), f"{point}:kill:{rng.randint(1, 8)}")
    victims = asyncio.create_task(kill_some(stack, rng, done))
    await asyncio.gather(*(create_one(client, rng, done) for _ in range(CREATES)))
    await victims
    return done


async def create_one(client: DSecClient, rng: random.Random, done: Round) -> None:
    """A create at a random moment; half of them are stopped again at once."""
    await asyncio.sleep(rng.uniform(0, 1.5))
    stop = rng.random() < 0.5
    try:
        sandbox = await client.create(
            image=IMAGE, **SMALL, labels={"job": "faults"}, idle_timeout_s=86_400, timeout=BUDGET_S
        )
        done.sandboxes.append(sandbox)
        if stop:
            await sandbox.stop()
            done.stopped.add(sandbox.id)
    except DSecError as err:
        done.errors.append(err)
    except Exception as err:  # an untyped error is a finding
        done.untyped.append(f"{type(err).__name__}: {err}")


async def kill_some(stack: Stack, rng: random.Random, done: Round) -> None:
    """kill -9 of one service, or ten seconds without NATS or Valkey."""
    await asyncio.sleep(rng.uniform(0.2, 1.2))
    if rng.random() < 0.25:
        done.victim = rng.choice(OUTAGES)
        await outage(stack, done.victim, OUTAGE_S)
    else:
        done.victim = rng.choice(VICTIMS)
        os.kill(await pid_of(stack, done.victim), signal.SIGKILL)


async def outage(stack: Stack, name: str, seconds: float) -> None:
    """Stop a process where it is for a while, as a server that hangs."""
    pid = await pid_of(stack, name)
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


async def pid_of(stack: Stack, name: str) -> int:
    found = {p["name"]: p["pid"] for p in await status(StackPaths(stack.home))}
    return int(str(found[name]))


async def arm(stack: Stack, node: str, fault: str) -> None:
    """Restart a node's edge so that it dies at a point; the supervisor's next start is clean."""
    request: dict[str, object] = {
        "command": "restart",
        "name": f"edge-{node}",
        "env": {"DSEC_FAULT": fault},
    }
    async for line in ask_control(StackPaths(stack.home).control, request):
        if "error" in line:
            raise RuntimeError(str(line["error"]))


async def audit(stack: Stack, client: DSecClient, rounds: Sequence[Round]) -> list[str]:
    """Two leases later: what the edges say and what the host holds must be the same, and right."""
    findings = [f"{r.point}/{r.seed}: untyped {text}" for r in rounds for text in r.untyped]
    listed = {info.sandbox_id: info async for info in client.list(labels={"job": "faults"})}
    alive = {i for i, info in listed.items() if info.state != "dead"}
    owned = {s.id for r in rounds for s in r.sandboxes}
    stopped = {i for r in rounds for i in r.stopped}
    requests = [info.request_id for i, info in listed.items() if i in alive]
    findings += [f"two sandboxes for request {r}" for r in set(requests) if requests.count(r) > 1]
    findings += [f"{i} lives but nobody was told" for i in alive - owned]
    findings += [f"{i} was stopped but lives" for i in stopped & alive]
    findings += [f"{s.id} of {s.node} is gone" for r in rounds for s in r.sandboxes
                 if s.id not in alive | stopped]  # fmt: skip
    return findings


def on_host(stack: Stack) -> set[str]:
    """Ids of sandboxes that have a cgroup on this host."""
    return {
        path.name
        for node in stack.node_names
        for path in Path("/sys/fs/cgroup/unified").glob(f"dsec-{node}/*/*_*_*")
    }
