"""One request, one sandbox: what a caller is promised about creates, through all services."""

from __future__ import annotations

import asyncio

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, Network, Policy
from libdsec.errors import (
    Conflict,
    DSecError,
    InvalidArgument,
    NoCapacity,
    NotFound,
    SandboxDead,
    Unsupported,
)
from tests.stack import IMAGE, SMALL, Stack

ALIASES = """\
[services.pypi]
rules = ["tcp:169.254.77.1:8081"]
[services.npm]
rules = ["tcp:169.254.77.1:8082"]
"""


async def test_listing_one_runs_unchanged(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_CONTEXT", str(stack.context))
    (stack.home / "aliases.toml").write_text(ALIASES)
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(
        container_image=IMAGE,
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": True},
        init_user="root",
    )
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    assert result.stdout == "hello world\n"
    await sandbox.stop()
    await client.close()


async def test_same_key_and_arguments_is_one_sandbox(client: DSecClient) -> None:
    first, second = await asyncio.gather(
        client.create(image=IMAGE, **SMALL, idempotency_key="one"),
        client.create(image=IMAGE, **SMALL, idempotency_key="one"),
    )
    third = await client.create(image=IMAGE, **SMALL, idempotency_key="one")
    assert first.id == second.id == third.id
    with pytest.raises(Conflict, match="one"):
        await client.create(image=IMAGE, **{**SMALL, "pids": 99}, idempotency_key="one")
    await first.stop()


async def test_another_projects_key_is_its_own(stack: Stack, client: DSecClient) -> None:
    async with DSecClient(context=stack.add_user("carol", "team-c")) as other:
        mine = await client.create(image=IMAGE, **SMALL, idempotency_key="shared-name")
        theirs = await other.create(image=IMAGE, **SMALL, idempotency_key="shared-name")
        assert mine.id != theirs.id
        with pytest.raises(NotFound):
            await (await other.connect(mine.id)).exec(["true"])
        assert mine.id not in [info.sandbox_id async for info in other.list()]
        await mine.stop()
        await theirs.stop()


async def test_create_many_answers_each_item(stack: Stack, client: DSecClient) -> None:
    made = await client.create_many(20, image=IMAGE, **SMALL)
    assert len({s.id for s in made}) == 20
    assert {s.node for s in made} == set(stack.node_names)
    results = await asyncio.gather(*(s.exec(["cat", "/proc/1/comm"]) for s in made))
    assert all(r.exit_code == 0 for r in results)
    await asyncio.gather(*(s.stop() for s in made))


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"image": "public/no-such-image"}, NotFound, "no-such-image"),
        ({"image": "public/busybox@999"}, NotFound, "999"),
        ({"image": IMAGE, "toolkits": ["absent@1"]}, NotFound, "absent"),
        ({"image": IMAGE, "backend": "rocket"}, InvalidArgument, "rocket"),
        ({"image": IMAGE, "backend": "microvm"}, Unsupported, "microvm"),
        ({"image": IMAGE, "memory_mib": -1}, InvalidArgument, "memory_mib"),
        ({"image": IMAGE, "memory_mib": 1 << 20}, NoCapacity, "memory"),
        ({"image": IMAGE, "cpus": 0}, InvalidArgument, "cpus"),
        ({"image": "", "cpus": 1.0}, InvalidArgument, "image"),
    ],
)
async def test_impossible_request_is_told_what_is_wrong(
    client: DSecClient, arguments: dict[str, object], error: type[DSecError], names: str
) -> None:
    with pytest.raises(error, match=names) as told:
        await client.create(**{**SMALL, **arguments}, timeout=10)  # type: ignore[arg-type]
    assert told.value.request_id or error is InvalidArgument


async def test_unenforceable_protection_is_refused(client: DSecClient) -> None:
    policy = Policy(network=Network.none(), protected_paths=["/tests/**"])
    with pytest.raises((Unsupported, NoCapacity), match="protected"):
        await client.create(image=IMAGE, **SMALL, policy=policy, timeout=15)


async def test_unknown_alias_names_the_operators_file(client: DSecClient) -> None:
    policy = Policy(network=Network.allow(services=["no-such-alias"]))
    with pytest.raises(DSecError, match="no-such-alias") as told:
        await client.create(image=IMAGE, **SMALL, policy=policy, timeout=15)
    assert "aliases.toml" in f"{told.value}"


async def test_stopped_sandbox_says_so(client: DSecClient) -> None:
    sandbox = await client.create(image=IMAGE, **SMALL)
    await sandbox.stop()
    await sandbox.stop()
    with pytest.raises(SandboxDead) as told:
        await sandbox.exec(["true"])
    assert told.value.reason == "stopped"


async def test_limits_are_what_was_asked_for(client: DSecClient) -> None:
    async with await client.create(
        image=IMAGE, cpus=0.5, memory_mib=64, disk_mib=32, pids=20, max_files=200
    ) as sandbox:
        full = await sandbox.exec("dd if=/dev/zero of=/fill bs=1M count=64 2>&1; echo done")
        assert "No space left" in full.stdout
        assert (await sandbox.files.stat("/fill")).size_bytes <= 32 << 20
        many = await sandbox.exec(
            "rm /fill; for i in $(seq 400); do : > /f$i || break; done; ls / | wc -l"
        )
        assert int(many.stdout.split()[-1]) < 230
        forks = await sandbox.exec("for i in $(seq 60); do sleep 5 & done; wait", timeout=20)
        assert forks.exit_code != 0 or "can't fork" in forks.stderr
        assert (await sandbox.exec(["true"])).exit_code == 0


async def test_memory_hog_dies_and_the_reason_is_told(client: DSecClient) -> None:
    async with await client.create(image=IMAGE, **SMALL) as sandbox:
        hog = await sandbox.exec("tail /dev/zero", timeout=30)
        assert hog.exit_code == 137
        assert (await sandbox.metrics()).oom_kills >= 1
        assert (await sandbox.exec(["echo", "alive"])).stdout == "alive\n"
