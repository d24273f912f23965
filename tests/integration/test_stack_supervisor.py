"""The supervisor over real processes: what dies comes back, whatever happened before."""

from __future__ import annotations

import asyncio
import gc
import json
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


def page(paths: StackPaths, name: str, port: int) -> ProcessSpec:
    argv = (sys.executable, "-c", _SERVER, str(port))
    return ProcessSpec(name, argv, {}, HttpReady(port, "/"), paths.log / f"{name}.log")


@pytest.fixture
def spec(paths: StackPaths) -> ProcessSpec:
    return page(paths, "page", free_port())


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


async def supervise_two_stages(home: str, ports: list[int]) -> Supervisor:
    paths = StackPaths(Path(home))
    supervisor = Supervisor(paths)
    supervisor.hold()
    for number, port in enumerate(ports):
        late = await supervisor.up(Stage(f"stage {number}", (page(paths, f"p{number}", port),)))
        assert late == []
    return supervisor


_KILLED = """
import asyncio, sys
from tests.integration.test_stack_supervisor import supervise_two_stages

async def main():
    await supervise_two_stages(sys.argv[1], [int(port) for port in sys.argv[2:]])
    print("up", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def left_by_a_killed_one(paths: StackPaths, ports: list[int]) -> set[int]:
    first = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _KILLED, str(paths.home), *map(str, ports),
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert first.stdout is not None
    async with asyncio.timeout(20):
        assert await first.stdout.readline() == b"up\n"
    first.kill()
    await first.wait()
    return {pid for pid, _ in json.loads(paths.processes.read_text()).values()}


async def test_a_killed_supervisors_processes_are_adopted_in_every_stage(
    paths: StackPaths,
) -> None:
    ports = [free_port(), free_port()]
    left = await left_by_a_killed_one(paths, ports)
    successor = await supervise_two_stages(str(paths.home), ports)
    assert {process["pid"] for process in successor.status()} == left
    assert await successor.down() == []
    await all_gone(left)


async def test_what_was_not_adopted_yet_is_stopped_as_well(paths: StackPaths) -> None:
    ports = [free_port(), free_port()]
    left = await left_by_a_killed_one(paths, ports)
    successor = await supervise_two_stages(str(paths.home), ports[:1])
    assert await successor.down() == []
    await all_gone(left)


async def all_gone(pids: set[int]) -> None:
    """Whoever is the parent of orphans reaps them in its own time."""
    async with asyncio.timeout(10):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.05)
