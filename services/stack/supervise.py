"""The supervisor process: brings the stack up, serves its control socket, takes it down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import cast

from libdsec.bus import Bus
from libdsec.errors import Conflict
from libdsec.wire import subjects

from ..chassis.topology import ensure_topology
from .configure import configure
from .control import Say, serve_control
from .description import StackDescription, hold_addresses
from .layout import StackPaths
from .plan import Plan, Principals
from .supervisor import Stage, Supervisor


class StackNotReadyError(Exception):
    """Some process did not become ready; the message names each."""


async def supervise(
    paths: StackPaths, description: StackDescription, env: Mapping[str, str], tell: Say
) -> None:
    """Run until told to go down; `tell` hears the progress of the start."""
    supervisor = Supervisor(paths)
    supervisor.hold()
    try:
        addresses = hold_addresses(description)
    except Conflict as err:
        tell({"error": str(err), "done": True})
        raise
    everybody = configure(paths, description)
    stopped = asyncio.Event()
    control = await serve_control(paths.control, _commands(supervisor, paths, description, stopped))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        await _bring_up(supervisor, Plan(paths, description, everybody, env), everybody, tell)
        tell({"done": True})
        await stopped.wait()
    except Exception as err:
        tell({"error": str(err), "done": True})
        raise
    finally:
        if not supervisor.stopping:
            await supervisor.down()
        control.close()
        addresses.close()
        paths.control.unlink(missing_ok=True)


async def _bring_up(supervisor: Supervisor, plan: Plan, everybody: Principals, tell: Say) -> None:
    tell({"say": "starting NATS and Valkey"})
    await _stage(supervisor, Stage("bus", plan.bus()))
    tell({"say": "declaring streams and buckets"})
    user = everybody.scheduler
    bus = await Bus.connect(
        [plan.hub_url()],
        user=user.name,
        password=user.password,
        inbox_prefix=user.inbox_prefix,
        name="dsec-stack",
    )
    try:
        await ensure_topology(
            bus,
            streams=subjects.STREAMS,
            durables=tuple(subjects.LANES.values()),
            buckets=subjects.BUCKETS,
        )
    finally:
        await bus.close()
    tell({"say": "starting the services"})
    await _stage(supervisor, Stage("services", plan.services()))


async def _stage(supervisor: Supervisor, stage: Stage) -> None:
    late = await supervisor.up(stage)
    if late:
        raise StackNotReadyError("; ".join(late))


def _commands(
    supervisor: Supervisor, paths: StackPaths, description: StackDescription, stopped: asyncio.Event
) -> Callable[[dict[str, object], Say], asyncio.Future[None]]:
    async def command(request: dict[str, object], say: Say) -> None:
        match request.get("command"):
            case "status":
                say({"processes": supervisor.status()})
            case "reload":
                configure(paths, description)
                supervisor.reload_users()
            case "down":
                say({"say": "stopping the services"})
                killed = await supervisor.down()
                if killed:
                    say({"say": f"had to kill: {', '.join(killed)}"})
                stopped.set()
            case "restart":
                env = cast("dict[str, str]", request.get("env", {}))
                await supervisor.restart(str(request.get("name")), env)
            case other:
                raise ValueError(f"no command {other!r}; there are status, reload, restart, down")

    return command  # type: ignore[return-value]


def teller(fd: int) -> Say:
    """Progress lines to whoever started us; silent once they stopped listening."""

    def tell(line: dict[str, object]) -> None:
        with contextlib.suppress(OSError):
            os.write(fd, json.dumps(line).encode() + b"\n")

    return tell
