"""A server that leaves: what runs finishes, nothing new comes, nothing falls between."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from libdsec.bus import Call
from libdsec.errors import DeadlineExceeded, Unavailable
from libdsec.wire.execution import ExecDone, ExecRequest

from .conftest import Connect
from .test_bus_requests import DONE, EXEC, ask


async def test_stop_lets_running_handlers_finish_and_takes_no_more(connect: Connect) -> None:
    server, client = await connect("server"), await connect("client")
    entered, release = asyncio.Event(), asyncio.Event()

    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        entered.set()
        await release.wait()
        return DONE

    serving = await server.serve(EXEC, handle, node="n1")
    running = asyncio.create_task(ask(client))
    await entered.wait()
    stopping = asyncio.create_task(serving.stop(timeout_s=5))

    async def until_refused() -> None:
        while True:  # until the server has taken the subscription away
            with contextlib.suppress(DeadlineExceeded):
                await ask(client, budget_s=0.2)

    with pytest.raises(Unavailable, match="nobody answers"):
        await until_refused()
    release.set()
    assert await running == DONE
    assert await stopping == 0


async def test_stop_cancels_what_does_not_finish_and_tells_the_caller(connect: Connect) -> None:
    server, client = await connect("server"), await connect("client")
    entered = asyncio.Event()

    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        entered.set()
        await asyncio.Event().wait()
        return DONE

    serving = await server.serve(EXEC, handle, node="n1")
    running = asyncio.create_task(ask(client))
    await entered.wait()
    assert await serving.stop(timeout_s=0.05) == 1
    with pytest.raises(Unavailable, match="stopping"):
        await running


async def test_no_request_is_lost_while_a_server_leaves(connect: Connect) -> None:
    """Each is answered or told that nobody is there; one that fell between would time out."""
    server, client = await connect("server"), await connect("client")
    outcomes: set[str] = set()

    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        return DONE

    async def hammer(stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await ask(client, budget_s=2)
                outcomes.add("ok")
            except Unavailable as err:
                outcomes.add(err.message.split(" on ")[0])

    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(hammer(stop))
        for _ in range(40):
            serving = await server.serve(EXEC, handle, node="n1")
            await asyncio.sleep(0.005)
            await serving.stop()
        stop.set()
    assert outcomes == {"ok", "nobody answers"}
