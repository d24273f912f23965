"""A stack's processes, to be killed, hung and armed on purpose."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from services.stack.control import ask_control
from services.stack.up import status
from tests.stack import Stack


class RestartError(Exception):
    """In the supervisor's words."""


async def pids_of(stack: Stack) -> dict[str, int]:
    return {str(p["name"]): int(str(p["pid"])) for p in await status(stack.paths)}


async def pid_of(stack: Stack, name: str) -> int:
    return (await pids_of(stack))[name]


async def restart(stack: Stack, name: str, env: Mapping[str, str]) -> None:
    """End a process if it runs and start it, once with more environment; returns when ready.

    Raises:
        RestartError: it did not become ready, or died before.
    """
    request: dict[str, object] = {"command": "restart", "name": name, "env": dict(env)}
    async for line in ask_control(stack.paths.control, request):
        if "error" in line:
            raise RestartError(str(line["error"]))


@dataclass(frozen=True)
class Disturbance:
    """Something that happens to a process: `kill -9`, or standing still for a while."""

    name: str
    hang_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} away {self.hang_s:.0f} s" if self.hang_s else f"{self.name} killed"

    async def happen(self, stack: Stack) -> None:
        pid = await pid_of(stack, self.name)
        if not self.hang_s:
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self.hang_s)
        finally:
            os.kill(pid, signal.SIGCONT)


def disturbances(node: str) -> tuple[Disturbance, ...]:
    """Every service in turn, and the two servers both killed and away."""
    return (
        Disturbance("scheduler"),
        Disturbance("nats-hub", hang_s=10.0),
        Disturbance(f"policy-{node}"),
        Disturbance("valkey", hang_s=10.0),
        Disturbance(f"nats-{node}"),
        Disturbance(f"snapshotter-{node}"),
        Disturbance("nats-hub"),
        Disturbance("burst"),
        Disturbance("valkey"),
    )
