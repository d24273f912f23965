"""What an operator does with a stack: up, down, doctor, nodes, cordon, a lost service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from tempfile import mkdtemp

import pytest

from libdsec import DSecClient, NoCapacity
from services.stack.up import status
from tests.leftovers import left_on_host
from tests.stack import IMAGE, SMALL, Stack


async def processes(stack: Stack) -> dict[str, int]:
    return {str(p["name"]): int(str(p["pid"])) for p in await status(stack.paths)}


async def test_up_again_changes_nothing(stack: Stack, client: DSecClient) -> None:
    before = await processes(stack)
    async with await client.create(image=IMAGE, **SMALL) as sandbox:
        await asyncio.to_thread(stack.up)
        assert await processes(stack) == before
        assert (await sandbox.exec(["echo", "on"])).stdout == "on\n"


async def test_doctor_finds_this_machine_fit(stack: Stack) -> None:
    checks = stack.dsec_json("doctor")
    assert isinstance(checks, list)
    assert {"root", "kernel", "crun", "nats-server", "cgroups", "disk limit"} <= {
        check["name"] for check in checks
    }
    assert [check for check in checks if check["needed"] and not check["ok"]] == []


async def test_cordoned_node_gets_nothing_and_keeps_what_it_has(
    stack: Stack, client: DSecClient
) -> None:
    first, second = stack.node_names
    made = await client.create_many(20, image=IMAGE, **SMALL)
    there = [s for s in made if not isinstance(s, Exception) and s.node == first]
    assert there
    try:
        assert stack.dsec("cordon", first, context=stack.operator_context).returncode == 0
        await _until_seen(client, first, cordoned=True)
        placed = await client.create_many(6, image=IMAGE, **SMALL)
        assert {s.node for s in placed if not isinstance(s, Exception)} == {second}
        assert (await there[0].exec(["echo", "on"])).stdout == "on\n"
        assert stack.dsec("cordon", second, context=stack.operator_context).returncode == 0
        await _until_seen(client, second, cordoned=True)
        with pytest.raises(NoCapacity, match="cordoned 2"):
            await client.create(image=IMAGE, **SMALL, timeout=2)
    finally:
        for node in stack.node_names:
            assert stack.dsec("uncordon", node, context=stack.operator_context).returncode == 0
    await _until_seen(client, first, cordoned=False)
    await _until_seen(client, second, cordoned=False)
    await client.stop_many(labels={})
    assert stack.dsec("cordon", first).returncode == 3, "an operator's business"


async def test_drained_node_cuts_no_rollout_short(stack: Stack, client: DSecClient) -> None:
    sandbox = await client.create(image=IMAGE, **SMALL)
    try:
        drained = stack.dsec("drain", sandbox.node, context=stack.operator_context)
        assert drained.returncode == 0, drained.stderr
        await _until_seen(client, sandbox.node, cordoned=True)
        async with await client.create(image=IMAGE, **SMALL) as other:
            assert other.node != sandbox.node
        assert (await sandbox.exec(["echo", "on"])).stdout == "on\n"
        assert "draining" in stack.dsec("nodes").stdout
    finally:
        stack.dsec("uncordon", sandbox.node, context=stack.operator_context)
    await _until_seen(client, sandbox.node, cordoned=False)
    await sandbox.stop()


async def _until_seen(client: DSecClient, node: str, *, cordoned: bool) -> None:
    async with asyncio.timeout(10):
        while True:
            seen = {v.heartbeat.node: v.heartbeat.cordoned for v in await client.nodes()}
            if seen[node] is cordoned:
                return
            await asyncio.sleep(0.1)


async def test_without_a_policy_service_nothing_starts(stack: Stack, client: DSecClient) -> None:
    """Fail closed: what runs goes on, what would start waits until rules can be enforced again."""
    running = await client.create(image=IMAGE, **SMALL)
    names = [f"policy-{node}" for node in stack.node_names]
    pids = await processes(stack)
    for name in names:
        os.kill(pids[name], signal.SIGSTOP)
    try:
        async with asyncio.timeout(15):
            while any(view.heartbeat.policy_ready for view in await client.nodes()):
                await asyncio.sleep(0.2)
        with pytest.raises(NoCapacity, match="policy"):
            await client.create(image=IMAGE, **SMALL, timeout=2)
        assert (await running.exec(["echo", "on"])).stdout == "on\n"
    finally:
        for name in names:
            os.kill(pids[name], signal.SIGCONT)
    await (await client.create(image=IMAGE, **SMALL, timeout=30)).stop()
    await running.stop()


async def test_pause_works_without_a_snapshotter(stack: Stack, client: DSecClient) -> None:
    names = [f"snapshotter-{node}" for node in stack.node_names]
    pids = await processes(stack)
    for name in names:
        os.kill(pids[name], signal.SIGSTOP)
    try:
        async with asyncio.timeout(15):
            while any(view.heartbeat.snapshotter_ready for view in await client.nodes()):
                await asyncio.sleep(0.2)
        async with await client.create(image=IMAGE, **SMALL) as sandbox:
            assert (await sandbox.pause()).state == "paused"
            assert (await sandbox.exec(["echo", "awake"])).stdout == "awake\n"
    finally:
        for name in names:
            os.kill(pids[name], signal.SIGCONT)


@pytest.mark.timeout(180)
async def test_supervisor_may_die_and_down_leaves_nothing(stack: Stack) -> None:
    """A stack of its own, with sandboxes in it, next to the one the other tests use."""
    own = Stack(Path(mkdtemp(prefix="dsec-e2e-", dir="/var/lib")), nodes=1)
    try:
        await asyncio.to_thread(own.up)
        assert not {node.name for node in own.description.nodes} & set(stack.node_names)
        ids = create_three(own)
        assert own.dsec("pause", ids[0]).returncode == 0
        before = await processes(own)
        os.kill(supervisor_of(own), signal.SIGKILL)
        assert own.dsec("exec", ids[1], "--", "true").returncode == 0
        await asyncio.to_thread(own.up)
        assert await processes(own) == before, "the next supervisor adopts what runs"
        assert own.dsec("exec", ids[0], "--", "true").returncode == 0
        os.kill(supervisor_of(own), signal.SIGKILL)
    finally:
        await asyncio.to_thread(own.down)
    assert await asyncio.to_thread(left_on_host, own) == []
    await asyncio.to_thread(own.down)
    assert own.dsec("ps").returncode == 3
    kept = {path.name for path in own.home.iterdir()}
    assert {"users.toml", "aliases.toml", "layers", "stack.json"} <= kept
    shutil.rmtree(own.home)


def create_three(stack: Stack) -> list[str]:
    made = stack.dsec("create", IMAGE, "--count", "3", "--memory-mib", "64", "--json",
                      "--rule", "tcp:10.0.0.1:1")  # fmt: skip
    assert made.returncode == 0, made.stderr
    return [str(json.loads(line)["sandbox_id"]) for line in made.stdout.splitlines()]


def supervisor_of(stack: Stack) -> int:
    mark = f"supervise --home {stack.home}"
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "cmdline").read_text().replace("\0", " "):
                found.append(int(entry.name))
    [pid] = found
    return pid
