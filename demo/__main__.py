"""`make demo`: bring a stack up, publish the layers, play eight rollouts, show what happened."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from libdsec import DSecClient

from . import stack
from .material import publish, source_distribution
from .mirror import build_index, serve
from .recording import recording
from .report import Progress, show_phases, show_rollouts, write_trajectories
from .rollout import Rollout, Trajectory
from .trace import show_trace

ROLLOUTS = 8
GATEWAY = "169.254.77.1"  # every node's own side of its sandboxes' network
OUT = Path(__file__).parent / "out" / "trajectories.jsonl"


async def play(console: Console, mirror_url: str, forbidden_url: str) -> list[Trajectory]:
    async with DSecClient(context=stack.HOME / "context.toml") as client:
        console.print("publishing layers (kept for the next run)", highlight=False)
        await publish(client, stack.HOME / "cache", stack.base_image())
        with Progress(console, ROLLOUTS) as progress:
            rollouts = [
                Rollout(
                    client,
                    recording(i, forbidden_url=forbidden_url, mirror_url=mirror_url),
                    i,
                    progress.update,
                )
                for i in range(ROLLOUTS)
            ]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(r.run()) for r in rollouts]
        trajectories = [task.result() for task in tasks]
        show_rollouts(console, trajectories)
        show_phases(console, trajectories)
        await show_trace(console, client, trajectories[0])
        return trajectories


def main() -> int:
    # A table needs room; a pipe has no width of its own.
    console = Console() if sys.stdout.isatty() else Console(width=150)
    begin = time.monotonic()
    servers = []
    try:
        stack.up()
        index = stack.HOME / "cache" / "mirror"
        build_index(index, source_distribution(stack.HOME / "cache"))
        mirror, forbidden = serve(index, GATEWAY, 0), serve(index, GATEWAY, 0)
        servers = [mirror, forbidden]
        mirror_url = f"http://{GATEWAY}:{mirror.server_port}/simple/"
        forbidden_url = f"http://{GATEWAY}:{forbidden.server_port}/simple/"
        stack.set_alias(
            "pypi", f"tcp:{GATEWAY}:{mirror.server_port}", {"PIP_INDEX_URL": mirror_url}
        )
        trajectories = asyncio.run(play(console, mirror_url, forbidden_url))
        write_trajectories(OUT, trajectories)
    except subprocess.CalledProcessError as err:
        return err.returncode  # it has said why itself
    finally:
        for server in servers:
            server.shutdown()
        clean = stack.down()
    rewarded = sum(t.reward == 1.0 for t in trajectories)
    console.print(
        f"{rewarded} of {ROLLOUTS} rewards are 1.0; {OUT} written; "
        f"{time.monotonic() - begin:.1f} s in all",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if clean and rewarded == ROLLOUTS else 1


if __name__ == "__main__":
    sys.exit(main())
