"""The client over a real NATS server: what only a server and separate processes can show."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from libdsec import DSecClient, PermissionDenied, Sandbox, Unavailable, execution
from libdsec.bus import Bus, Call
from libdsec.context import Context
from libdsec.wire.placement import PlaceRequest
from libdsec.wire.subjects import PLACEMENTS
from services.chassis.topology import ensure_topology
from tests.world.world import World

from .conftest import Connect
from .servers import NatsServer

NUMBERS = "i=0; while [ $i -lt 60000 ]; do printf '%051d\\n' $i; i=$((i+1)); done"
NUMBERED = b"".join(b"%051d\n" % i for i in range(60000))

USERS = """
authorization {
  users = [
    { user: alice, password: alice-password, permissions: {
        publish: ["dsec.v1.p.team-a.>", "$JS.API.INFO"],
        subscribe: ["_INBOX.team-a.alice.>"] } }
    { user: service, password: service-password }
  ]
}
"""


@pytest.fixture
def nats_config() -> str:
    return USERS


@pytest.fixture
async def world(tmp_path: Path, connect: Connect) -> AsyncIterator[World]:
    async def as_service(name: str) -> Bus:
        return await connect(name, user="service", password="service-password")

    await ensure_topology(await as_service("topology"), streams=[PLACEMENTS])
    made = await World(tmp_path / "world").start(as_service)
    yield made
    await made.close()


@pytest.fixture
def context(tmp_path: Path, nats_server: NatsServer) -> Path:
    """What an operator hands to a user."""
    path = tmp_path / "context.toml"
    Context(
        servers=(nats_server.url,), project="team-a", user="alice", password="alice-password"
    ).write(path)
    return path


@pytest.fixture
async def client(world: World, context: Path) -> AsyncIterator[DSecClient]:
    async with DSecClient(context=context) as opened:
        yield opened


async def test_a_sandbox_from_create_to_stop(client: DSecClient, world: World) -> None:
    async with await client.create(image="busybox", labels={"job": "j"}) as sandbox:
        heard: list[str] = []
        result = await sandbox.exec(NUMBERS, on_stdout=heard.append, max_output_bytes=8 << 20)
        assert result.stdout_bytes == NUMBERED
        assert "".join(heard).encode() == NUMBERED
        assert (await sandbox.exec(NUMBERS, max_output_bytes=8 << 20)).stdout_bytes == NUMBERED
        await sandbox.files.write("f", NUMBERED)
        assert await sandbox.files.read("f") == NUMBERED
        listing = client.list(labels={"job": "j"})
        assert [info.sandbox_id async for info in listing] == [sandbox.id]
    assert world.edge.stops == [sandbox.id]


async def test_many_at_once(client: DSecClient) -> None:
    made = await client.create_many(200, image="busybox")
    assert len({item.id for item in made if isinstance(item, Sandbox)}) == 200
    results = await asyncio.gather(
        *(item.exec(["echo", item.id]) for item in made[:50] if isinstance(item, Sandbox))
    )
    assert [r.stdout.strip() for r in results] == [
        i.id for i in made[:50] if isinstance(i, Sandbox)
    ]


async def test_another_project_is_permission_denied(world: World, context: Path) -> None:
    async with DSecClient(context=context, project="team-a") as mine:
        sandbox = await mine.create(image="busybox")
    with pytest.raises(PermissionDenied):
        async with DSecClient(context=context, project="team-b"):
            pass  # not even the inbox may be listened on
    async with DSecClient(context=context) as mine:
        # A client that lies about its project, with an inbox that it may listen on.
        mine._connection.settings = replace(mine._connection.settings, project="team-b")
        for refused in (
            mine.create(image="busybox", timeout=10),
            Sandbox(
                mine._connection, sandbox.id, backend=sandbox.backend, labels={}
            ).exec(["true"]),
        ):  # fmt: skip
            with pytest.raises(PermissionDenied, match="team-b") as caught:
                await refused
            assert caught.value.request_id
    async with DSecClient(context=context) as mine:
        with pytest.raises(PermissionDenied, match="ops"):
            [info async for info in mine.list(every_project=True)]


async def test_wrong_credentials_and_no_server_are_told_apart(
    nats_server: NatsServer, context: Path
) -> None:
    with pytest.raises(PermissionDenied, match="credentials"):
        await DSecClient(context=context, user="alice", password="wrong").open()
    nats_server.kill()
    began = time.monotonic()
    with pytest.raises(Unavailable, match="no NATS server") as caught:
        await DSecClient(context=context).open()
    assert time.monotonic() - began < 15
    assert nats_server.url in caught.value.hint


async def test_a_command_survives_a_restart_of_nats(
    client: DSecClient, world: World, nats_server: NatsServer
) -> None:
    sandbox = await client.create(image="busybox")
    slow = "i=0; while [ $i -lt 40 ]; do echo $i; i=$((i+1)); sleep 0.05; done"
    heard: list[str] = []
    running = asyncio.create_task(sandbox.exec(slow, on_stdout=heard.append))
    while len(heard) < 3:
        await asyncio.sleep(0.01)
    nats_server.kill()
    await asyncio.sleep(0.3)
    nats_server.start()
    result = await running
    whole = "".join(f"{n}\n" for n in range(40))
    assert result.stdout == whole
    assert "".join(heard) == whole
    assert len(world.edge.commands.dispatched) == 1


async def test_a_create_survives_a_restart_of_nats(
    client: DSecClient, world: World, nats_server: NatsServer
) -> None:
    waiting = asyncio.Event()

    async def holds(request: PlaceRequest, call: Call) -> None:
        waiting.set()  # taken, and forgotten with the server

    world.scheduler.place = holds
    creating = asyncio.create_task(client.create(image="busybox", timeout=30))
    await waiting.wait()
    world.scheduler.place = world.scheduler.place_all
    nats_server.kill()
    nats_server.start()
    sandbox = await creating
    assert list(world.edge.boxes) == [sandbox.id]
    assert {request.key for request in world.scheduler.requests} == {
        world.scheduler.requests[0].key
    }


async def test_with_nats_gone_everything_fails_in_its_time(
    client: DSecClient, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "LEASE_S", 1.0)
    sandbox = await client.create(image="busybox")
    nats_server.kill()
    async with asyncio.timeout(20):
        with pytest.raises(Unavailable):
            await client.create(image="busybox", timeout=1)
        with pytest.raises(Unavailable, match="node n1"):
            await sandbox.exec(["true"], timeout=None)


async def test_the_forked_child_and_its_parent_both_go_on(world: World, context: Path) -> None:
    script = """
        import os, sys, threading
        from libdsec.sync import DSecClient

        client = DSecClient()
        sandbox = client.create(image="busybox")
        assert sandbox.exec(["echo", "parent"]).stdout == "parent\\n"
        child = os.fork()
        if child == 0:
            said = sandbox.exec(["echo", "child"]).stdout
            other = client.create(image="busybox")
            sandbox.files.write("from-child", b"x")
            client.close()
            os._exit(0 if said == "child\\n" and other.id != sandbox.id else 1)
        for number in range(20):
            assert sandbox.exec(["echo", str(number)]).stdout == f"{number}\\n"
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        assert sandbox.files.read("from-child") == b"x"
        threads = [threading.Thread(target=sandbox.exec, args=(["true"],)) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        sandbox.stop()
        client.close()
        print("done")
    """
    done = await _python(script, context)
    assert done == "done\n"
    assert len(world.edge.boxes) == 2


async def _python(script: str, context: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", textwrap.dedent(script),
        env={**os.environ, "DSEC_CONTEXT": str(context)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 40)
    assert process.returncode == 0, err.decode()
    assert err == b""
    return out.decode()


DSEC = str(Path(sys.executable).with_name("dsec"))


async def test_an_interrupt_of_dsec_exec_kills_the_command(
    client: DSecClient, world: World, context: Path
) -> None:
    sandbox = await client.create(image="busybox")
    process = await asyncio.create_subprocess_exec(
        DSEC, "exec", sandbox.id, "-c", "echo begun; sleep 60",
        env={**os.environ, "DSEC_CONTEXT": str(context)}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 10) == 130
    [command] = world.edge.commands.known.values()
    while command.done is None:
        await asyncio.sleep(0.01)
    assert command.done.signal == signal.SIGKILL
