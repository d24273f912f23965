"""A stack of a benchmark's own: `async with running() as client`."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from libdsec import DSecClient

_DSEC = str(Path(sys.executable).parent / "dsec")


async def _dsec(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(_DSEC, *argv, stdout=sys.stderr)
    if await process.wait():
        raise RuntimeError(f"dsec {' '.join(argv)} failed")


@asynccontextmanager
async def running(*, nodes: int = 1) -> AsyncIterator[DSecClient]:
    """Bring a stack up in a directory of its own, hand out a client, take everything away."""
    home = Path(tempfile.mkdtemp(prefix="dsec-bench-", dir="/var/lib"))
    try:
        await _dsec("up", "--home", str(home), "--nodes", str(nodes))
        async with DSecClient(context=home / "context.toml") as client:
            yield client
    finally:
        await _dsec("down", "--home", str(home))
        shutil.rmtree(home)
