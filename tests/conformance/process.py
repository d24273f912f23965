"""What a command that lives on by itself must be like."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from libdsec import ExecTimeout, Exited, NotFound, Output, Sandbox

from .case import NUMBERED, NUMBERS, Cases


class ProcessCases(Cases):
    """start, attach, processes."""

    async def test_a_process_talks_until_its_end(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("while read x; do echo got $x; done; exit 5")
        assert process.pid > 0
        await process.write("one\ntwo\n")
        await process.close_stdin()
        events = [event async for event in process]
        assert b"".join(e.data for e in events if isinstance(e, Output)) == b"got one\ngot two\n"
        assert isinstance(events[-1], Exited)
        assert events[-1].result.exit_code == 5

    async def test_a_process_outlives_its_handle_and_is_found_again(self, sandbox: Sandbox) -> None:
        exec_id = f"p-{os.urandom(4).hex()}"
        pid = (await sandbox.start(["cat"], exec_id=exec_id)).pid
        listed = {p.exec_id: p for p in await sandbox.processes()}
        assert (listed[exec_id].running, listed[exec_id].pid) == (True, pid)
        again = await sandbox.attach(exec_id)
        await again.write("hello")
        await again.close_stdin()
        assert (await again.wait()).stdout == "hello"

    async def test_input_given_at_the_start_arrives_whole(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["wc", "-c"], stdin=b"x" * 300_000)
        assert (await process.wait(timeout=20)).stdout.split() == ["300000"]
        small = await sandbox.start(["cat"], stdin=b"hi")
        assert (await small.wait(timeout=20)).stdout == "hi"

    async def test_output_is_read_again_from_an_offset(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("printf 0123456789", stdin=b"")
        assert (await process.wait()).stdout == "0123456789"
        later = await sandbox.attach(process.exec_id, 7)
        assert (await later.wait()).stdout == "789"

    async def test_a_slow_reader_loses_nothing(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(NUMBERS, stdin=b"")
        collected = bytearray()
        async for event in process:
            if isinstance(event, Output):
                collected += event.data
                await asyncio.sleep(0.002)
        assert bytes(collected) == NUMBERED

    async def test_a_kill_ends_the_tree_and_may_be_repeated(
        self, sandbox: Sandbox, home: str
    ) -> None:
        beating = f"(while :; do date >> {home}/beat; sleep 0.1; done) & wait"
        process = await sandbox.start(beating)
        while not await sandbox.files.exists(f"{home}/beat"):
            await asyncio.sleep(0.05)
        await process.kill()
        before = await sandbox.files.read(f"{home}/beat")
        await process.kill()
        assert (await process.wait(timeout=20)).signal == signal.SIGKILL
        await sandbox.exec("sleep 0.5")
        assert await sandbox.files.read(f"{home}/beat") == before

    async def test_a_signal_may_be_handled_inside(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(
            "trap 'echo usr1; exit 7' USR1; echo up; while :; do sleep 0.1; done"
        )
        async for event in process:
            if isinstance(event, Output) and b"up" in event.data:
                await process.kill(signal.SIGUSR1)
            if isinstance(event, Exited):
                assert event.result.exit_code == 7

    async def test_output_is_heard_while_it_runs(self, sandbox: Sandbox) -> None:
        """Each line is answered only when it has been heard: nothing waits for the end."""
        process = await sandbox.start("while read x; do echo $x; done")
        await process.write("0\n")
        heard = b""
        async for event in process:
            if isinstance(event, Exited):
                break
            heard += event.data
            if heard.endswith(b"3\n"):
                await process.close_stdin()
            else:
                await process.write(f"{heard.count(10)}\n")
        assert heard == b"0\n1\n2\n3\n"

    async def test_a_processes_own_timeout_ends_it(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("echo begun; sleep 60", timeout=1)
        with pytest.raises(ExecTimeout) as caught:
            await process.wait(timeout=30)
        assert caught.value.result is not None
        assert caught.value.result.stdout == "begun\n"

    async def test_what_nobody_started_is_not_found(self, sandbox: Sandbox) -> None:
        with pytest.raises(NotFound):
            await sandbox.attach("never-started")
