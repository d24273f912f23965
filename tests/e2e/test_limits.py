"""A sandbox ends when its time is over, and gets no more than it was given."""

from __future__ import annotations

import asyncio

import pytest

from libdsec import DSecClient, Sandbox
from libdsec.errors import InvalidArgument, NoCapacity, SandboxDead
from tests.stack import IMAGE, SMALL


async def until_dead(sandbox: Sandbox, within_s: float = 20.0) -> SandboxDead:
    """Looks without resuming or touching it."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                await sandbox.info()
            except SandboxDead as err:
                return err
            await asyncio.sleep(0.1)


async def test_idle_sandbox_expires(client: DSecClient) -> None:
    sandbox = await client.create(image=IMAGE, **SMALL, idle_timeout_s=1.0)
    assert (await until_dead(sandbox)).reason == "expired"
    with pytest.raises(SandboxDead):
        await client.connect(sandbox.id)


async def test_a_running_command_is_not_idleness(client: DSecClient) -> None:
    sandbox = await client.create(image=IMAGE, **SMALL, idle_timeout_s=2.0)
    assert (await sandbox.exec("sleep 3; echo done")).stdout == "done\n"
    await sandbox.start(["sleep", "4"], stdin=b"")  # nor is one that nobody reads
    await asyncio.sleep(3.0)
    assert (await sandbox.info()).state == "ready"
    assert (await until_dead(sandbox)).reason == "expired"


async def test_paused_time_has_a_limit_of_its_own(client: DSecClient) -> None:
    sandbox = await client.create(
        image=IMAGE, **SMALL, idle_timeout_s=2.0, max_lifetime_s=3.0, max_paused_s=6.0
    )
    await sandbox.pause()
    await asyncio.sleep(4.0)
    assert (await sandbox.info()).state == "paused"
    assert (await until_dead(sandbox)).reason == "expired"


async def test_lifetime_ends_it_whatever_it_does_and_can_be_extended(client: DSecClient) -> None:
    longer = await client.create(image=IMAGE, **SMALL, max_lifetime_s=4.0)
    await longer.extend(max_lifetime_s=600.0)
    sandbox = await client.create(image=IMAGE, **SMALL, max_lifetime_s=4.0)
    with pytest.raises(SandboxDead) as told:
        await sandbox.exec(["sleep", "30"])
    assert told.value.reason == "expired"
    assert (await longer.exec(["echo", "on"])).stdout == "on\n"
    await longer.stop()


async def test_stopped_sandbox_says_so(client: DSecClient) -> None:
    sandbox = await client.create(image=IMAGE, **SMALL)
    await sandbox.stop()
    await sandbox.stop()
    with pytest.raises(SandboxDead) as told:
        await sandbox.exec(["true"])
    assert told.value.reason == "stopped"


async def test_disk_and_files_are_limited(client: DSecClient) -> None:
    async with await client.create(
        image=IMAGE, cpus=1.0, memory_mib=64, disk_mib=32, pids=20, max_files=200
    ) as sandbox:
        full = await sandbox.exec("dd if=/dev/zero of=/fill bs=1M count=64 2>&1; rm /fill")
        assert "No space left" in full.stdout
        many = await sandbox.exec("mkdir /m; cd /m; i=0; while touch $i; do i=$((i+1)); done; ls")
        made = len(many.stdout.split())
        assert 150 < made <= 200
        assert (await sandbox.exec(["echo", "alive"])).stdout == "alive\n"


async def test_processes_are_limited(client: DSecClient) -> None:
    async with await client.create(image=IMAGE, **{**SMALL, "pids": 20}) as sandbox:
        forks = await sandbox.exec("for i in $(seq 60); do sleep 5 & done; jobs | wc -l")
        assert "can't fork" in forks.stderr
        await asyncio.sleep(5)
        assert (await sandbox.exec(["echo", "alive"])).stdout == "alive\n"


async def test_processor_time_is_limited(client: DSecClient) -> None:
    async with await client.create(image=IMAGE, **{**SMALL, "cpus": 0.2}) as sandbox:
        before = (await sandbox.metrics()).cpu_usage_s
        busy = await sandbox.exec("timeout 2 sh -c 'while :; do :; done'")
        used_s = (await sandbox.metrics()).cpu_usage_s - before
        assert used_s < 0.2 * busy.duration_s * 1.3 + 0.1


async def test_memory_hog_dies_and_the_rest_lives(client: DSecClient) -> None:
    async with await client.create(image=IMAGE, **SMALL) as sandbox:
        hog = await sandbox.exec("tail /dev/zero", timeout=30)
        assert (hog.exit_code, hog.oom_killed) == (137, True)
        assert (await sandbox.metrics()).oom_kills >= 1
        assert (await sandbox.exec(["echo", "alive"])).stdout == "alive\n"


async def test_shared_memory_counts(client: DSecClient) -> None:
    async with await client.create(image=IMAGE, **SMALL, shm_mib=8) as sandbox:
        full = await sandbox.exec("dd if=/dev/zero of=/dev/shm/x bs=1M count=16 2>&1")
        assert "No space left" in full.stdout


async def test_more_than_the_node_has_is_told_at_once(client: DSecClient) -> None:
    with pytest.raises((InvalidArgument, NoCapacity), match="memory_mib"):
        await client.create(image=IMAGE, memory_mib=1 << 20, timeout=10)
