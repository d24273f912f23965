"""One create as a tree of spans, printed by the command an on-call engineer would use."""

from __future__ import annotations

import asyncio
import os

from rich.console import Console

from libdsec import DSecClient

from . import stack
from .rollout import Trajectory


async def show_trace(console: Console, client: DSecClient, trajectory: Trajectory) -> None:
    """`dsec trace REQUEST_ID` of the rollout's create."""
    await client.open()  # its own spans are with the edge before somebody asks for them
    process = await asyncio.create_subprocess_exec(
        stack.DSEC, "trace", trajectory.request_id,
        env={**os.environ, "DSEC_CONTEXT": str(stack.HOME / "context.toml")},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(process.communicate(), 30)
    console.print(f"trace of the create of rollout {trajectory.rollout}", highlight=False)
    console.print(said.decode(), highlight=False, markup=False, soft_wrap=True)
