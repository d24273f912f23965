"""The blocking twin: complete, shared by threads, and never blocking its own loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from libdsec import client as async_client
from libdsec import files as async_files
from libdsec import layers as async_layers
from libdsec import process as async_process
from libdsec import sandbox as async_sandbox
from libdsec import selection as async_selection
from libdsec import sync
from libdsec.errors import DeadlineExceeded, InvalidArgument
from libdsec.execution import Output
from libdsec.process import Exited
from tests.world.memory import MemoryServer, memory_bus
from tests.world.world import World

# What a transfer is made of and what rebinds a handle: for the package's own use.
INTERNAL = {
    "bound_to",
    "call",
    "chunks",
    "entries",
    "link",
    "look",
    "make",
    "make_parent",
    "write_chunks",
}


@pytest.mark.parametrize(
    ("core", "twin"),
    [
        (async_client.DSecClient, sync.DSecClient),
        (async_sandbox.Sandbox, sync.Sandbox),
        (async_process.Process, sync.Process),
        (async_files.Files, sync.Files),
        (async_layers.Layers, sync.Layers),
        (async_selection.SandboxListing, sync.SandboxListing),
    ],
)
def test_the_twin_has_every_name(core: type, twin: type) -> None:
    public = {name for name in vars(core) if not name.startswith("_")}
    if core is not async_client.DSecClient:
        public -= INTERNAL
    assert public <= set(dir(twin)), f"missing: {public - set(dir(twin))}"
    for name in public:
        if inspect.iscoroutinefunction(vars(core)[name]):
            twin_method = getattr(twin, name)
            assert not inspect.iscoroutinefunction(twin_method)
            assert twin_method.__doc__ == vars(core)[name].__doc__


@pytest.fixture
def world(tmp_path: Path, memory: MemoryServer, unconfigured: Path) -> Iterator[World]:
    """On the loop of the blocking client, since the bus in memory does not leave its loop."""
    made = sync._LOOP.run(World(tmp_path / "w").start(lambda name: memory_bus(memory, name)))
    yield made
    sync._LOOP.run(made.close())


@pytest.fixture
def client(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[sync.DSecClient]:
    monkeypatch.setattr("libdsec.placing._LINGER_S", 0.1)
    with sync.DSecClient(["memory://"]) as opened:
        yield opened


def test_the_same_names_without_await(client: sync.DSecClient, tmp_path: Path) -> None:
    with client.create(image="busybox", labels={"job": "j"}) as sandbox:
        assert sandbox.exec(["echo", "hi"]).stdout == "hi\n"
        sandbox.files.write("f", b"data")
        assert sandbox.files.read("f") == b"data"
        sandbox.files.download("f", tmp_path / "f")
        listing = client.list(labels={"job": "j"})
        assert [info.sandbox_id for info in listing] == [sandbox.id]
        assert listing.coverage.answered == {"n1"}
        process = sandbox.start(["cat"])
        process.write("x")
        process.close_stdin()
        events = list(process)
        assert isinstance(events[0], Output)
        assert isinstance(events[-1], Exited)
        assert process.wait().stdout == "x"
    made = client.create_many(3, image="busybox")
    assert all(isinstance(item, sync.Sandbox) for item in made)
    assert client.connect(made[0].id).info().sandbox_id == made[0].id  # type: ignore[union-attr]


def test_threads_share_one_client(client: sync.DSecClient, world: World) -> None:
    sandbox = client.create(image="busybox")
    together = threading.Barrier(8, timeout=10)

    def run(number: int) -> str:
        together.wait()
        return sandbox.exec(["echo", str(number)]).stdout

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(8))) == [f"{n}\n" for n in range(8)]
    # They ran at once: each needs all the others to have begun.
    gate = world.edge.home / "gate"
    gate.mkdir()
    wait = f"touch {gate}/$$; while [ $(ls {gate} | wc -l) -lt 8 ]; do sleep 0.01; done"
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: sandbox.exec(wait, timeout=10).exit_code, range(8)))
    assert results == [0] * 8


def test_a_blocking_call_from_a_callback_is_refused_not_hung(client: sync.DSecClient) -> None:
    sandbox = client.create(image="busybox")
    with pytest.raises(InvalidArgument, match="callback"):
        sandbox.exec(["echo", "x"], on_stdout=lambda text: sandbox.stop())


def test_errors_come_out_as_they_are(client: sync.DSecClient, world: World) -> None:
    async def never(request: object, call: object) -> None:
        await asyncio.sleep(0)

    world.scheduler.place = never
    with pytest.raises(DeadlineExceeded) as caught:
        client.create(image="busybox", timeout=0.2)
    assert caught.value.request_id


def test_an_interrupted_call_is_cancelled_on_the_loop(
    client: sync.DSecClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = threading.Event()

    async def never(request: object, call: object) -> None:
        queued.set()

    world.scheduler.place = never

    def interrupted(self: object, timeout: float | None = None) -> None:
        queued.wait(10)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(concurrent.futures.Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.create(image="busybox")
    deadline = time.monotonic() + 10
    while not world.scheduler.cancelled:
        assert time.monotonic() < deadline
        time.sleep(0.01)
