"""What a sandbox's life must be like."""

from __future__ import annotations

import asyncio

import pytest

from libdsec import Sandbox, SandboxDead
from libdsec.wire.sandbox import State

from .case import Cases


class LifeCases(Cases):
    """State, pause, stop. Each case has a sandbox of its own."""

    async def test_info_and_metrics_tell_of_a_running_sandbox(self, sandbox: Sandbox) -> None:
        info = await sandbox.info()
        assert (info.sandbox_id, info.state) == (sandbox.id, State.READY)
        assert info.created_at > 0
        metrics = await sandbox.metrics()
        assert metrics.memory_limit_bytes > 0
        assert metrics.processes >= 1

    async def test_a_paused_sandbox_stands_still_and_goes_on(
        self, sandbox: Sandbox, home: str
    ) -> None:
        count = f"i=0; while :; do i=$((i+1)); echo $i > {home}/n; sleep 0.05; done"
        await sandbox.start(count, stdin=b"")
        while not await sandbox.files.exists(f"{home}/n"):
            await asyncio.sleep(0.05)
        paused = await sandbox.pause()
        assert paused.state is State.PAUSED
        assert (await sandbox.info()).state is State.PAUSED  # asking does not resume it
        await sandbox.pause()
        cpu = (await sandbox.metrics()).cpu_usage_s
        await asyncio.sleep(0.5)
        assert (await sandbox.metrics()).cpu_usage_s == pytest.approx(cpu, abs=0.02)
        resumed = await sandbox.resume()
        assert resumed.state is State.READY
        before = await sandbox.files.read(f"{home}/n")
        await asyncio.sleep(0.5)
        assert await sandbox.files.read(f"{home}/n") != before

    async def test_a_command_resumes_a_paused_sandbox(self, sandbox: Sandbox) -> None:
        await sandbox.pause()
        assert (await sandbox.exec(["echo", "awake"], timeout=30)).stdout == "awake\n"
        assert (await sandbox.info()).state is State.READY

    async def test_a_paused_sandbox_can_be_stopped(self, sandbox: Sandbox) -> None:
        await sandbox.pause()
        await sandbox.stop()
        with pytest.raises(SandboxDead):
            await sandbox.exec(["true"])

    async def test_stop_is_final_idempotent_and_told(self, sandbox: Sandbox) -> None:
        running = asyncio.create_task(sandbox.exec("sleep 60"))
        await sandbox.exec(["true"])
        await sandbox.stop()
        with pytest.raises(SandboxDead) as caught:
            await running
        assert caught.value.reason.value == "stopped"
        await sandbox.stop()
