"""The supervisor over real processes: what dies comes back, whatever happened before."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.stack.layout import StackPaths
from services.stack.probe_ready import HttpReady
from services.stack.process import ProcessSpec
from services.stack.supervisor import AlreadySupervisedError, Stage, Supervisor

from .servers import free_port

_SERVER = """
import http.server, os, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ.get("MARK", "").encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""


@pytest.fixture
def paths(tmp_path: Path) -> StackPaths:
    paths = StackPaths(tmp_path)
    paths.make()
    return paths


@pytest.fixture
def spec(paths: StackPaths) -> ProcessSpec:
    port = free_port()
    argv = (sys.executable, "-c", _SERVER, str(port))
    return ProcessSpec("page", argv, {}, HttpReady(port, "/"), paths.log / "page.log")


@pytest.fixture
async def supervisor(paths: StackPaths, spec: ProcessSpec) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(paths)
    supervisor.hold()
    assert await supervisor.up(Stage("pages", (spec,))) == []
    yield supervisor
    assert await supervisor.down() == []


def pid_of(supervisor: Supervisor) -> int:
    [process] = supervisor.status()
    assert process["alive"]
    return int(str(process["pid"]))


async def until_another(supervisor: Supervisor, pid: int) -> int:
    async with asyncio.timeout(10):
        while not supervisor.status()[0]["alive"] or pid_of(supervisor) == pid:
            await asyncio.sleep(0.02)
    return pid_of(supervisor)


async def test_what_dies_is_started_again(supervisor: Supervisor) -> None:
    first = pid_of(supervisor)
    os.kill(first, signal.SIGKILL)
    second = await until_another(supervisor, first)
    os.kill(second, signal.SIGKILL)
    await until_another(supervisor, second)
    assert supervisor.status()[0]["restarts"] == 2


async def test_a_death_after_commanded_restarts_is_noticed(supervisor: Supervisor) -> None:
    """What watched the process before must not take the watch over its successor away."""
    for _ in range(3):
        before = pid_of(supervisor)
        await supervisor.restart("page", {"MARK": "once"})
        assert pid_of(supervisor) != before
        gc.collect()
    pid = pid_of(supervisor)
    os.kill(pid, signal.SIGKILL)
    await until_another(supervisor, pid)


async def test_more_environment_is_for_one_start_only(supervisor: Supervisor) -> None:
    await supervisor.restart("page", {"MARK": "once"})
    marked = pid_of(supervisor)
    assert b"MARK=once" in Path(f"/proc/{marked}/environ").read_bytes()
    os.kill(marked, signal.SIGKILL)
    again = await until_another(supervisor, marked)
    assert b"MARK" not in Path(f"/proc/{again}/environ").read_bytes()


async def test_an_unknown_process_is_named(supervisor: Supervisor) -> None:
    with pytest.raises(KeyError, match="nothing"):
        await supervisor.restart("nothing", {})


async def test_a_second_supervisor_is_refused(paths: StackPaths, supervisor: Supervisor) -> None:
    with pytest.raises(AlreadySupervisedError, match=str(paths.home)):
        Supervisor(paths).hold()
