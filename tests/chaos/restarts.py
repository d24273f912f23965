"""An edge killed and started again, over and over: all sandboxes adopted, deaths told rightly."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter as Tally
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from libdsec import DSecClient, DSecError, Sandbox, SandboxDead
from tests.stack import IMAGE, SMALL, Stack

from . import host
from .audit import SETTLE_S, audit
from .counters import Counter, check_all, outputs_are_whole, start_counters
from .processes import pid_of, restart

LABEL = "restarts"
_LOOK_EVERY = 3  # restarts between two looks at all counters
_VICTIMS_ALIVE = 4
_TOLD_S = 30.0
_FOR_EVER_S = 86_400.0


@dataclass
class Restarts:
    """What a loop of restarts has seen so far."""

    restarts: int = 0
    ready_s: list[float] = field(default_factory=list)  # from the kill to the successor's readiness
    deaths: Tally[str] = field(default_factory=Tally)  # told rightly, by reason
    findings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Victim:
    """A sandbox that is to end for a reason while its edge is away."""

    sandbox: Sandbox
    reason: str


async def run(
    stack: Stack,
    client: DSecClient,
    seconds: float,
    seed: int,
    *,
    counters: int,
    tell: Callable[[str], None],
) -> Restarts:
    """Kill and restart edges for so long; then everything is looked at once more."""
    rng = random.Random(seed)
    seen = Restarts()
    counting = await start_counters(client, counters, LABEL)
    mains = _main_processes(stack)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not seen.findings:
        await _once(stack, client, rng, seen)
        if seen.restarts % _LOOK_EVERY == 0:
            seen.findings += await check_all(counting)
            seen.findings += _same(stack, counting, mains)
            tell(f"{seen.restarts} restarts, {len(counting)} counters, told: {dict(seen.deaths)}")
    await asyncio.sleep(SETTLE_S)
    seen.findings += await check_all(counting) + await outputs_are_whole(counting)
    seen.findings += _same(stack, counting, mains) + await audit(stack, client, [])
    await client.stop_many(labels={"job": LABEL})
    return seen


async def _once(stack: Stack, client: DSecClient, rng: random.Random, seen: Restarts) -> None:
    """One edge dies, some of its sandboxes end meanwhile, its successor tells how."""
    node = rng.choice(stack.node_names)
    victims = await _make_victims(client, node)
    edge = f"edge-{node}"
    os.kill(await pid_of(stack, edge), signal.SIGKILL)
    killed = time.monotonic()
    for victim in victims:
        if victim.reason == "killed":
            os.kill(host.main_processes(node)[victim.sandbox.id], signal.SIGKILL)
    await restart(stack, edge, {})
    seen.ready_s.append(time.monotonic() - killed)
    seen.restarts += 1
    for victim in victims:
        await _tell(victim, seen)
    mounts = host.layer_mounts(await pid_of(stack, edge))
    seen.findings += [f"layer {d[:12]} is mounted {n} times" for d, n in mounts.items() if n > 1]


async def _make_victims(client: DSecClient, node: str) -> list[Victim]:
    """On this node: one whose main process will be killed, one whose time will run out, and one
    that was stopped just before."""
    victims: list[Victim] = []
    for reason in ("killed", "expired", "stopped"):
        lifetime_s = 1.0 if reason == "expired" else _FOR_EVER_S
        sandbox = await _on_node(client, node, lifetime_s)
        if sandbox is None:
            continue
        if reason == "stopped":
            await sandbox.stop()
        victims.append(Victim(sandbox, reason))
    return victims


async def _on_node(client: DSecClient, node: str, lifetime_s: float) -> Sandbox | None:
    """A sandbox on that node, if it is chosen in a few tries."""
    for _ in range(_VICTIMS_ALIVE):
        try:
            sandbox = await client.create(
                image=IMAGE, **SMALL, labels={"job": "victims"}, max_lifetime_s=lifetime_s,
                idle_timeout_s=_FOR_EVER_S, timeout=30,
            )  # fmt: skip
        except DSecError:
            continue  # its edge is not back yet; what is tested here are restarts
        if sandbox.node == node:
            return sandbox
        await sandbox.stop()
    return None


async def _tell(victim: Victim, seen: Restarts) -> None:
    """The sandbox is dead, for the reason it died of."""
    try:
        async with asyncio.timeout(_TOLD_S):
            while True:
                try:
                    await victim.sandbox.info()
                except SandboxDead as err:
                    told = err.reason
                    break
                await asyncio.sleep(0.1)
    except (DSecError, TimeoutError) as err:
        seen.findings.append(f"{victim.reason} {victim.sandbox.id}: {type(err).__name__}: {err}")
        return
    if told == victim.reason:
        seen.deaths[victim.reason] += 1
    else:
        seen.findings.append(f"{victim.sandbox.id}: {victim.reason}, but told {told}")


def _main_processes(stack: Stack) -> dict[str, int]:
    return {i: pid for node in stack.node_names for i, pid in host.main_processes(node).items()}


def _same(stack: Stack, counters: Sequence[Counter], mains: dict[str, int]) -> list[str]:
    """Each sandbox still is the process it was at first."""
    now, ids = _main_processes(stack), [c.sandbox.id for c in counters]
    return [f"{i} is another process now" for i in ids if now.get(i) != mains.get(i)]
