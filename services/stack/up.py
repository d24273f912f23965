"""`dsec up`: from nothing, or from what runs already, to a stack that takes creates."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from libdsec.errors import Unavailable, Unsupported
from libhost import command

from .configure import configure
from .control import ask_control
from .description import StackDescription, load_or_make
from .doctor import BUILD
from .layout import StackPaths
from .plan import SERVICES_ROOT, unbuilt

_START_TIMEOUT_S = 120.0

Say = Callable[[str], None]


async def up(paths: StackPaths, *, nodes: int, schedulers: int, say: Say) -> StackDescription:
    """Make sure the stack runs; returns when it is ready.

    Raises:
        Conflict: the home holds a stack of another shape.
        Unsupported: a program that a node needs is not built.
        Unavailable: something did not become ready; the message names it and its log.
    """
    if missing := unbuilt():
        raise Unsupported(f"{missing[0]} does not exist: no node can start", hint=BUILD)
    paths.make()
    description = load_or_make(paths, nodes=nodes, schedulers=schedulers)
    configure(paths, description)
    if await _running(paths):
        say("already running; reading users and aliases again")
        async for _ in ask_control(paths.control, {"command": "reload"}):
            pass
        return description
    await _start(paths, say)
    return description


async def status(paths: StackPaths) -> list[dict[str, object]]:
    """The processes of a running stack; empty when it does not run."""
    try:
        async for line in ask_control(paths.control, {"command": "status"}):
            if "processes" in line:
                return cast("list[dict[str, object]]", line["processes"])
    except ConnectionError:
        return []
    return []


async def _running(paths: StackPaths) -> bool:
    return bool(await status(paths))


async def _start(paths: StackPaths, say: Say) -> None:
    """Start the supervisor and follow its progress over a pipe until it is ready or gives up."""
    read_fd, write_fd = os.pipe()
    log = os.open(paths.log / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    argv = (sys.executable, "-m", f"{SERVICES_ROOT}.stack", "supervise", "--home", str(paths.home))
    try:
        command.spawn(argv, fds={3: write_fd}, output_fd=log, env=_environment())
    finally:
        os.close(write_fd)
        os.close(log)
    reader = asyncio.StreamReader()
    pipe = os.fdopen(read_fd, "rb")
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            await _follow(reader, say)
    except TimeoutError as err:
        raise Unavailable(f"the stack was not ready in {_START_TIMEOUT_S:.0f} s") from err
    except EOFError as err:
        raise Unavailable(
            "the supervisor ended before the stack was ready",
            hint=f"see {paths.log / 'supervisor.log'}",
        ) from err


async def _follow(reader: asyncio.StreamReader, say: Say) -> None:
    while line := await reader.readline():
        said = json.loads(line)
        if "error" in said:
            raise Unavailable(str(said["error"]))
        if said.get("done"):
            return
        say(str(said.get("say", "")))
    raise EOFError


def _environment() -> dict[str, str]:
    """The supervisor's: what a child needs to find its interpreter's packages, and no more."""
    from .settings import passed_on

    return {**passed_on(), "PYTHONPATH": str(Path(__file__).parents[2])}
