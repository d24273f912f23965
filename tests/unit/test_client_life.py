"""A sandbox's life, many sandboxes at once, layers, and what is not built yet."""

from __future__ import annotations

import asyncio
import bz2
import io
import socket
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from libdsec import (
    AlreadyExists,
    DataLoss,
    DeathReason,
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    InvalidArgument,
    LayerKind,
    Network,
    NotFound,
    Policy,
    Sandbox,
    SandboxDead,
    Unavailable,
    Unsupported,
    Upload,
)
from libdsec.bus import Call
from libdsec.wire.envelope import Rpc
from libdsec.wire.layer import PublishChunk, PublishProgress
from libdsec.wire.node import NodeState
from libdsec.wire.sandbox import NetworkAllow, NetworkNone, PauseResult, PauseSandbox, State
from libdsec.wire.subjects import LAYER_CHUNK, PAUSE
from tests.world.memory import MemoryServer, memory_bus
from tests.world.world import World


@pytest.fixture
async def sandbox(client: DSecClient) -> Sandbox:
    return await client.create(image="busybox", labels={"job": "j1"})


async def test_the_first_listing_of_the_report_runs_unchanged(
    world: World, memory: MemoryServer, unconfigured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_SERVERS", "memory://")
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(
        container_image="busybox", memory_limit_mb=4096, cpu_cores_limit=4, ttl_running_stop=300,
        network_rules={"npm": False, "pypi": True}, init_user="root",
    )  # fmt: skip
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    assert (result.stdout, result.exit_code) == ("hello world\n", 0)
    await sandbox.stop()
    spec = world.edge.boxes[sandbox.id].spec
    assert spec.policy.network == NetworkAllow(services=("pypi",))
    assert (spec.resources.memory_mib, spec.resources.cpus) == (4096, 4.0)
    assert (spec.lifetime.idle_timeout_s, spec.user) == (300.0, "root")
    await client.close()


async def test_life_is_told_and_changed(world: World, sandbox: Sandbox) -> None:
    assert (await sandbox.info()).state is State.READY
    assert (await sandbox.metrics()).processes == 2
    assert (await sandbox.pause()).reclaimed_bytes == 7
    assert (await sandbox.info()).state is State.PAUSED
    assert (await sandbox.resume()).state is State.READY
    extended = await sandbox.extend(idle_timeout_s=60)
    assert extended.idle_expires_at is not None
    assert extended.expires_at is None
    with pytest.raises(InvalidArgument, match="idle_timeout_s"):
        await sandbox.extend(idle_timeout_s=-1)
    [denial] = (await sandbox.audit()).denials
    assert (denial.kind, denial.count) == ("network", 3)


async def test_a_network_left_out_is_none_never_as_before(world: World, sandbox: Sandbox) -> None:
    box = world.edge.boxes[sandbox.id]
    assert await sandbox.set_network(Network.allow(services=["pypi"])) == 2
    assert box.network == NetworkAllow(services=("pypi",))
    assert await sandbox.set_network() == 3
    assert box.network == NetworkNone()


async def test_phases_are_switched_by_name(world: World, client: DSecClient) -> None:
    sandbox = await client.create(
        image="busybox",
        phases={
            "solve": Policy(protected_paths=["/tests/**"]),
            "score": Policy(network=Network.public()),
        },
    )
    box = world.edge.boxes[sandbox.id]
    assert (box.spec.phase, box.spec.policy.protected_paths) == ("solve", ("/tests/**",))
    assert await sandbox.set_phase("score") == 2
    with pytest.raises(InvalidArgument, match="nonsense"):
        await sandbox.set_phase("nonsense")


async def test_stop_is_idempotent_and_the_dead_say_why(
    world: World, client: DSecClient, sandbox: Sandbox
) -> None:
    await sandbox.stop()
    await sandbox.stop()
    with pytest.raises(SandboxDead) as caught:
        await sandbox.pause()
    assert caught.value.reason is DeathReason.STOPPED
    other = await client.create(image="busybox")
    world.edge.kill(other.id, DeathReason.OOM)
    with pytest.raises(SandboxDead) as connecting:
        await client.connect(other.id)
    assert connecting.value.reason is DeathReason.OOM
    assert connecting.value.infrastructure


async def test_a_context_stops_its_sandbox_and_keeps_the_bodys_error(
    world: World, client: DSecClient
) -> None:
    async with await client.create(image="busybox") as sandbox:
        pass
    assert world.edge.boxes[sandbox.id].info.state is State.DEAD
    with pytest.raises(ZeroDivisionError):
        async with await client.create(image="busybox") as second:
            raise ZeroDivisionError
    assert second.id in world.edge.stops


async def test_connect_finds_a_sandbox_again(client: DSecClient, sandbox: Sandbox) -> None:
    found = await client.connect(sandbox.id)
    assert (found.id, found.labels, found.request_id) == (
        sandbox.id, {"job": "j1"}, sandbox.request_id
    )  # fmt: skip
    with pytest.raises(NotFound, match="n1_aaaaaa_bbbbbbbbbbbb"):
        await client.connect("n1_aaaaaa_bbbbbbbbbbbb")
    with pytest.raises(InvalidArgument, match="sandbox id"):
        await client.connect("nonsense")


async def test_an_absent_node_is_waited_for_and_named(
    client: DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libdsec.client.SUSPECT_AFTER_S", 0.2)
    with pytest.raises(Unavailable, match="node n9") as caught:
        await client.connect("n9_aaaaaa_bbbbbbbbbbbb")
    assert caught.value.request_id


# --- many -----------------------------------------------------------------------------------------


@pytest.fixture
async def three(
    tmp_path: Path, memory: MemoryServer, unconfigured: Path
) -> AsyncIterator[tuple[World, DSecClient]]:
    """Three nodes with two sandboxes of job `a` each and one of job `b`."""
    world = await World(tmp_path / "three", nodes=3).start(lambda name: memory_bus(memory, name))
    async with DSecClient(["memory://"]) as client:
        await client.create_many(6, image="busybox", labels={"job": "a"})
        await client.create_many(3, image="busybox", labels={"job": "b"})
        yield world, client
    await world.close()


Three = tuple[World, DSecClient]


async def test_list_gathers_from_every_node(three: Three) -> None:
    _, client = three
    listing = client.list(labels={"job": "a"})
    found = [info async for info in listing]
    assert sorted(info.node for info in found) == ["n1", "n1", "n2", "n2", "n3", "n3"]
    assert [i.created_at for i in found] == sorted(i.created_at for i in found)
    assert listing.coverage.answered == {"n1", "n2", "n3"}
    assert not listing.coverage.missing
    some = client.list(limit=2)
    assert len([info async for info in some]) == 2
    assert some.coverage.dropped == 7


async def test_list_names_who_did_not_answer(three: Three) -> None:
    world, client = three
    for serving in world.buses[1].servings:
        if serving.template.endswith("edges.list"):
            await serving.stop()
    world.scheduler.states["n3"] = NodeState.LOST
    listing = client.list(timeout=0.3)
    found = [info async for info in listing]
    assert {info.node for info in found} >= {"n1"}
    assert listing.coverage.missing == {"n2", "n3"}
    assert listing.coverage.nodes_known


async def test_list_without_a_scheduler_says_that_it_cannot_know(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, client = three
    monkeypatch.setattr("libdsec.selection._NODES_S", 0.1)
    await world.buses[-1].close()
    listing = client.list(timeout=0.3)
    assert len([info async for info in listing]) == 9
    assert not listing.coverage.nodes_known


async def test_many_by_label_touch_only_their_own(three: Three) -> None:
    world, client = three
    dry = await client.pause_many(labels={"job": "a"}, dry_run=True)
    assert len(dry.done) == 6
    assert not paused(world)
    done = await client.pause_many(labels={"job": "a"})
    assert set(done.done) == paused(world) == set(dry.done)
    assert done.coverage.answered == {"n1", "n2", "n3"}
    await client.resume_many(labels={"job": "a"})
    assert not paused(world)
    stopped = await client.stop_many(labels={"job": "b"})
    assert len(stopped.done) == 3
    assert len([info async for info in client.list()]) == 6


async def test_many_with_a_limit_take_that_many_over_all_nodes(three: Three) -> None:
    world, client = three
    dry = await client.pause_many(labels={}, limit=4, dry_run=True)
    assert len(dry.done) == 4
    assert not paused(world)
    done = await client.pause_many(labels={}, limit=4)
    assert paused(world) == set(done.done) == set(dry.done)
    assert done.coverage.dropped == 5
    with pytest.raises(InvalidArgument, match="limit"):
        await client.stop_many(labels={}, limit=0)


async def test_many_keep_each_failure_with_its_id(three: Three) -> None:
    world, client = three

    async def die(message: PauseSandbox, call: Call) -> PauseResult:
        raise SandboxDead("gone", reason=DeathReason.KILLED)

    await replace(world, PAUSE, die)
    done = await client.pause_many(labels={"job": "a"}, limit=100)
    assert set(done.done) == paused(world)
    assert {sandbox_id.partition("_")[0] for sandbox_id in done.failed} == {"n1"}
    assert (len(done.done), len(done.failed)) == (4, 2)


def paused(world: World) -> set[str]:
    return {
        sandbox_id
        for edge in world.edges
        for sandbox_id, box in edge.boxes.items()
        if box.info.state is State.PAUSED
    }


async def test_nodes_and_queue(three: Three) -> None:
    _, client = three
    assert [view.heartbeat.node for view in await client.nodes()] == ["n1", "n2", "n3"]
    assert [lane.waiting for lane in await client.queue()] == [3]


# --- layers ---------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_bytes(b"x" * 300_000)
    (root / "bin/tool").chmod(0o755)
    (root / "link").symlink_to("/bin/tool")
    return root


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {m.name.removeprefix("./"): m for m in archive}


async def test_a_directory_becomes_a_layer(world: World, client: DSecClient, source: Path) -> None:
    seen: list[Upload] = []
    layer = await client.layers.publish(
        source, "tools@7", "toolkit", env={"PATH": "/bin"}, on_progress=seen.append
    )
    assert (layer.ref, layer.kind, layer.files) == ("default/tools@7", LayerKind.TOOLKIT, 1)
    assert layer.config.env == {"PATH": "/bin"}
    packed = members(world.edge.archives[layer.ref])
    assert (packed["bin/tool"].mode, packed["link"].linkname) == (0o755, "/bin/tool")
    assert {(m.uid, m.gid, m.uname) for m in packed.values()} == {(0, 0, "")}
    assert len(seen) > 3
    assert seen[-1].sent_bytes == layer.size_bytes
    with pytest.raises(AlreadyExists, match="tools@7"):
        await client.layers.publish(source, "tools@7", "toolkit")


async def test_the_same_tree_is_the_same_archive(
    world: World, client: DSecClient, source: Path
) -> None:
    first = await client.layers.publish(source, "a", "workspace")
    second = await client.layers.publish(source, "b", "workspace")
    assert first.digest == second.digest


async def test_archives_are_sent_as_they_are_or_unpacked(
    world: World, client: DSecClient, source: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "layer.tar"
    with tarfile.open(plain, "w") as archive:
        archive.add(source, ".")
    squeezed = tmp_path / "layer.tar.bz2"
    squeezed.write_bytes(bz2.compress(plain.read_bytes()))
    for path in (plain, squeezed):
        layer = await client.layers.publish(path, f"from-{path.suffix[1:]}", "base")
        assert world.edge.archives[layer.ref] == plain.read_bytes()


async def test_layers_are_listed_looked_at_and_removed(client: DSecClient, source: Path) -> None:
    for name, kind in (("w", "workspace"), ("t", "toolkit"), ("t", "toolkit")):
        await client.layers.publish(source, name, kind)
    assert [layer.ref for layer in await client.layers.list(kind="toolkit")] == [
        "default/t@1", "default/t@2"
    ]  # fmt: skip
    short = await client.layers.list(limit=2)
    assert (len(short), short.dropped) == (2, 1)
    newest = await client.layers.info("t")
    assert newest.version == "2"
    await client.create(image="w@1", workspace=newest)
    with pytest.raises(InvalidArgument, match="which version"):
        await client.layers.remove("t")
    assert (await client.layers.remove("t@2")).version == "2"
    with pytest.raises(NotFound):
        await client.layers.info("t@2")


async def test_a_layer_that_cannot_be_is_refused(
    world: World, client: DSecClient, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="nothing at"):
        await client.layers.publish(tmp_path / "no", "x", "base")
    with pytest.raises(InvalidArgument, match="unknown kind"):
        await client.layers.publish(source, "x", "image")
    with pytest.raises(InvalidArgument, match="space"):
        await client.layers.publish(source, "public/x", "base")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(source / "sock"))
        with pytest.raises(InvalidArgument, match="socket"):
            await client.layers.publish(source, "x", "base")
    assert not world.edge.layers


async def test_a_publisher_that_lost_a_piece_is_noticed(
    world: World, client: DSecClient, source: Path
) -> None:
    async def forgets(message: PublishChunk, call: Call) -> PublishProgress:
        return PublishProgress(received=message.offset)

    await replace(world, LAYER_CHUNK, forgets)
    with pytest.raises(DataLoss, match="n1 has 0 of"):
        await client.layers.publish(source, "x", "base")


async def replace(world: World, rpc: Rpc[Any, Any], handler: Callable[..., Any]) -> None:
    """Node n1 answers this one request otherwise from now on."""
    for serving in world.buses[0].servings:
        if serving.template == rpc.template:
            await serving.stop()
    await world.buses[0].serve(rpc, handler, project="*", node="n1")


# --- not built yet --------------------------------------------------------------------------------


async def test_names_that_are_not_built_exist_and_say_so(
    client: DSecClient, sandbox: Sandbox
) -> None:
    calls: list[Awaitable[object]] = [
        client.quota("p"),
        client.call("python", "1"),
        client.layers.import_oci("docker.io/x", "x"),
        sandbox.session("s"),
        sandbox.pack_diff("x"),
        sandbox.fork(2),
        sandbox.forward(80),
        sandbox.http(80, None),
    ]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, Unsupported)
        assert not outcome.retryable


async def test_every_error_of_a_call_carries_its_ids(client: DSecClient) -> None:
    sandbox = await client.create(image="busybox")
    failing: list[Awaitable[object]] = [
        client.create(image=""),
        client.connect("nonsense"),
        client.quota("p"),
        client.layers.info("UPPER"),
        client.layers.publish("/nowhere", "x", "base"),
        sandbox.exec([]),
        sandbox.start(["sh"], tty=True),
        sandbox.session("s"),
        sandbox.extend(-1),
        sandbox.files.read("nothing"),
        sandbox.files.read(""),
        client.connect("n1_aaaaaa_bbbbbbbbbbbb"),
        client.layers.info("nothing"),
        client.stop_many(labels={"bad label": "x"}),
    ]
    for outcome in await asyncio.gather(*failing, return_exceptions=True):
        assert isinstance(outcome, DSecError)
        assert outcome.request_id
        assert len(outcome.trace_id) == 32
