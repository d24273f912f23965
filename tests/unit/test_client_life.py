"""A sandbox's life, many sandboxes at once, layers, and what is not built yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from libdsec import (
    DeathReason,
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    InvalidArgument,
    Network,
    NotFound,
    Policy,
    Sandbox,
    SandboxDead,
    Unavailable,
    Unsupported,
    connection,
)
from libdsec.wire.sandbox import NetworkAllow, NetworkNone, State
from tests.world.memory import MemoryLink, MemoryServer
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


# --- not built yet --------------------------------------------------------------------------------


@pytest.fixture
def lost(server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first request after `stop` or `rename` vanishes, as with an edge that is killed."""
    monkeypatch.setattr(connection, "SILENCE_S", 0.05)
    seen: list[str] = []
    publish = server.publish

    def lossy(sender: MemoryLink, msg: Msg) -> None:
        verb = msg.subject.rpartition(".")[2]
        if verb in ("stop", "rename"):
            seen.append(verb)
            if len(seen) == 1:
                return
        publish(sender, msg)

    monkeypatch.setattr(server, "publish", lossy)
    return seen


async def test_what_vanished_with_its_edge_is_asked_again(
    world: World, sandbox: Sandbox, lost: list[str]
) -> None:
    async with asyncio.timeout(5):
        await sandbox.stop()
    assert len(lost) >= 2
    assert world.edge.boxes[sandbox.id].info.death == "stopped"


async def test_what_may_not_be_done_twice_is_not_asked_again(
    sandbox: Sandbox, lost: list[str]
) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await sandbox.files.rename("/tmp/a", "/tmp/b")
    assert lost == ["rename"]


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
