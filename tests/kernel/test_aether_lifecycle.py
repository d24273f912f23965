"""Ends, in crun containers: deadlines, kills, what is left behind, zombies, bombs, shutdown."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.edge.agent import (
    AgentChannel,
    AgentGoneError,
    AgentRefusedError,
    AgentResult,
    ErrorCode,
    ExecSpec,
    KillScope,
    ProcessState,
)
from services.edge.agent.protocol import ExitFlag
from tests.kernel.aether_sandbox import (
    AgentSandbox,
    container,
    install,
    limited,
    plain,
    require_binary,
)

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentSandbox]:
    require_binary()
    with container(tmp_path_factory.mktemp("a")) as started:
        yield started


@pytest.fixture
async def channel(sandbox: AgentSandbox) -> AsyncIterator[AgentChannel]:
    opened = await AgentChannel.connect(sandbox.socket)
    yield opened
    for process in await opened.processes():
        if process.state is not ProcessState.ENDED:
            await opened.kill(process.exec_id)
    await opened.aclose()


_ids = iter(range(10**6))


def spec(*argv: str, **more: object) -> ExecSpec:
    return ExecSpec(exec_id=f"l{next(_ids)}", argv=argv, **more)  # type: ignore[arg-type]


async def sh(channel: AgentChannel, text: str, **more: object) -> AgentResult:
    return await channel.exec(spec("/bin/sh", "-c", text, **more))


async def eventually(check, timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not check():
            await asyncio.sleep(0.01)


# What a tree may do to outlive a kill: ignore the polite signals, leave session, group and
# parent, stop itself.
STUBBORN = """
trap '' TERM INT HUP QUIT
sleep 1000 &
setsid sh -c 'trap "" TERM; (sleep 1000 & sleep 1000 & wait) & wait' &
( setsid sleep 1000 > /dev/null 2>&1 < /dev/null & ) &
setsid sh -c 'kill -STOP $$' &
echo ready
while :; do sleep 1000; done
"""


async def test_a_timeout_ends_the_whole_tree_and_keeps_the_output(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    result = await sh(channel, STUBBORN, timeout_s=0.5)
    assert sandbox.leaf_pids() == []  # already when the answer arrives
    assert (result.timed_out, result.exit_code, result.signal) == (True, 137, 9)
    assert result.stdout == b"ready\n"
    assert 0.5 <= result.duration_s < 5


async def test_a_killed_tree_is_gone_when_kill_returns(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    process = await channel.start(spec("/bin/sh", "-c", STUBBORN))
    async for chunk in process:
        assert chunk.data == b"ready\n"
        break
    await eventually(lambda: len(sandbox.leaf_pids()) >= 7)
    assert await channel.kill(process.exec_id)
    assert sandbox.leaf_pids() == []
    assert (await process.wait()).signal == 9
    assert not await channel.kill(process.exec_id)  # idempotent


async def test_a_terminated_tree_gets_the_signal_in_every_process(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    process = await channel.start(spec("/bin/sh", "-c", "setsid sleep 1000 & sleep 1000 & wait"))
    await eventually(lambda: len(sandbox.leaf_pids()) == 3)
    assert await channel.kill(process.exec_id, signal.SIGTERM, scope=KillScope.TREE)
    await eventually(lambda: sandbox.leaf_pids() == [])
    assert (await process.wait()).signal == signal.SIGTERM


async def test_the_exit_is_not_held_by_a_child_with_the_pipes(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    begun = time.monotonic()
    result = await sh(channel, "sleep 1000 & echo started")
    assert (result.stdout, result.exit_code) == (b"started\n", 0)
    assert time.monotonic() - begun < 5
    (left,) = [one for one in await channel.processes() if one.exec_id == result.exec_id]
    assert left.state is ProcessState.CHILDREN_LEFT
    assert len(sandbox.leaf_pids()) == 1
    assert await channel.kill(result.exec_id)
    assert sandbox.leaf_pids() == []


async def test_output_within_the_grace_is_waited_for(channel: AgentChannel) -> None:
    """A pipeline's last word often comes just after its leader."""
    result = await sh(channel, "(for i in 1 2 3 4 5; do usleep 50000; echo $i; done) & echo 0")
    assert result.stdout == b"0\n1\n2\n3\n4\n5\n"


async def test_a_chattering_child_is_let_go_after_a_bounded_time(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    begun = time.monotonic()
    result = await sh(channel, "(while :; do echo x; usleep 10000; done) & echo started")
    assert time.monotonic() - begun < 10
    assert result.stdout.startswith(b"started\n")
    # It neither blocks on its pipe nor dies of it: what it writes is read and thrown away.
    await asyncio.sleep(0.3)
    assert len(sandbox.leaf_pids()) >= 1


async def test_a_child_left_behind_may_write_for_ever(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    script = (
        "(usleep 300000; dd if=/dev/zero bs=1024 count=1024 2> /dev/null; echo > /tmp/wrote) & :"
    )
    await sh(channel, "rm -f /tmp/wrote; " + script)
    await eventually(lambda: (sandbox.root / "tmp" / "wrote").exists())


async def test_a_deadline_is_the_leaders_not_its_childrens(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    result = await sh(channel, "sleep 1000 > /dev/null 2>&1 & :", timeout_s=0.3)
    assert (result.exit_code, result.timed_out) == (0, False)
    await asyncio.sleep(0.5)
    assert len(sandbox.leaf_pids()) == 1


async def test_a_daemon_belongs_to_its_command(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    daemon = "setsid sh -c 'setsid sleep 1000 > /dev/null 2>&1 < /dev/null &' > /dev/null 2>&1 &"
    result = await sh(channel, daemon)
    await eventually(lambda: len(sandbox.leaf_pids()) == 1)
    assert await channel.kill(result.exec_id)
    assert sandbox.leaf_pids() == []


async def test_a_command_that_closes_its_output_goes_on(channel: AgentChannel) -> None:
    result = await sh(
        channel, "echo before; exec > /dev/null 2>&1 < /dev/null; usleep 300000; exit 4"
    )
    assert (result.stdout, result.exit_code) == (b"before\n", 4)
    assert result.duration_s > 0.25


async def test_a_command_that_stops_itself_can_be_continued(channel: AgentChannel) -> None:
    process = await channel.start(spec("/bin/sh", "-c", "kill -STOP $$; echo on"))
    await asyncio.sleep(0.1)
    assert await channel.kill(process.exec_id, signal.SIGCONT, scope=KillScope.GROUP)
    assert [chunk.data async for chunk in process] == [b"on\n"]


async def test_a_stopped_command_meets_its_deadline(channel: AgentChannel) -> None:
    assert (await sh(channel, "kill -STOP $$", timeout_s=0.3)).timed_out


async def test_frozen_time_does_not_count(channel: AgentChannel) -> None:
    process = asyncio.create_task(sh(channel, "sleep 0.5", timeout_s=0.3))
    await asyncio.sleep(0.1)
    channel.frozen_for(2.0)
    assert not (await process).timed_out


async def test_what_the_edge_says_before_the_thaw_is_heard_before_the_deadline(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    command = asyncio.create_task(sh(channel, "usleep 700000; echo done", timeout_s=1.5))
    await asyncio.sleep(0.1)
    freeze = sandbox.cgroup / "cgroup.freeze"
    freeze.write_text("1")
    try:
        begun = time.monotonic()
        await asyncio.sleep(2)
        channel.frozen_for(time.monotonic() - begun)
        await asyncio.sleep(0.05)
    finally:
        freeze.write_text("0")
    result = await command
    assert (result.stdout, result.timed_out) == (b"done\n", False)


async def test_orphans_do_not_stay_zombies(channel: AgentChannel, sandbox: AgentSandbox) -> None:
    storm = "i=0; while [ $i -lt 1000 ]; do ( : & ) ; i=$((i+1)); done"
    assert (await sh(channel, storm)).exit_code == 0
    await channel.ping()

    def children() -> list[str]:
        tasks = Path(f"/proc/{sandbox.pid}/task/{sandbox.pid}/children").read_text().split()
        return [pid for pid in tasks if Path(f"/proc/{pid}").exists()]

    await eventually(lambda: children() == [])


async def test_leaves_do_not_pile_up(channel: AgentChannel, sandbox: AgentSandbox) -> None:
    await asyncio.gather(*(sh(channel, "sleep 0.05") for _ in range(60)))
    await asyncio.gather(*(sh(channel, "sleep 100", timeout_s=0.1) for _ in range(20)))
    await eventually(lambda: len(list(sandbox.cgroup.glob("aether*"))) <= 16)


# --- in sandboxes of their own ---


async def test_a_fork_bomb_below_its_limit_takes_neither_agent_nor_answer(tmp_path: Path) -> None:
    require_binary()
    with limited("pids", {"pids.max": 200}) as pids, container(tmp_path, joined=(pids,)) as own:
        channel = await AgentChannel.connect(own.socket)
        install(own, "bomb", "#include <unistd.h>\nint main(void) { for (;;) fork(); }")
        bomb = await channel.start(spec("/bin/bomb"), watch=True)
        await eventually(lambda: int((pids / "pids.current").read_text()) >= 195)
        with pytest.raises(AgentRefusedError) as refused:
            await _until_refused(channel)
        assert (refused.value.code, refused.value.errno) == (ErrorCode.LIMIT, 11)
        assert await channel.ping() < 5
        assert await channel.kill(bomb.exec_id)
        assert own.leaf_pids() == []
        assert (await sh(channel, "echo alive")).stdout == b"alive\n"
        await channel.aclose()


async def _until_refused(channel: AgentChannel) -> None:
    """The bomb leaves a gap now and then, through which a command slips."""
    for _ in range(1000):
        await channel.exec(spec("/bin/true"))


async def test_a_memory_hog_dies_and_the_agent_lives(tmp_path: Path) -> None:
    require_binary()
    limit = {"memory.limit_in_bytes": 64 << 20}
    with limited("memory", limit) as memory, container(tmp_path, joined=(memory,)) as own:
        channel = await AgentChannel.connect(own.socket)
        result = await sh(channel, "x=y; while :; do x=$x$x; done")
        assert result.exit_code in {2, 137}, result  # ash gives up itself, or is killed
        result = await channel.exec(spec("/bin/tail", "/dev/zero"))
        assert result.signal == 9
        assert (await sh(channel, "echo alive")).stdout == b"alive\n"
        await channel.aclose()


@pytest.mark.parametrize("polite", [True, False])
async def test_shutdown_takes_everything_along(tmp_path: Path, polite: bool) -> None:
    require_binary()
    with container(tmp_path) as own:
        channel = await AgentChannel.connect(own.socket)
        script = "sleep 1000; echo got it" if polite else STUBBORN
        process = await channel.start(spec("/bin/sh", "-c", script))
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        await channel.shutdown(0.5)
        assert isinstance(await channel.wait_closed(), AgentGoneError)
        assert (time.monotonic() - begun < 0.4) is polite
        await eventually(lambda: own.pids() == [])
        if polite:
            assert (await process.wait()).signal == signal.SIGTERM


async def test_a_termination_signal_counts_only_from_outside(tmp_path: Path) -> None:
    require_binary()
    with container(tmp_path) as own:
        channel = await AgentChannel.connect(own.socket)
        for name in ("TERM", "KILL", "STOP", "INT", "USR1", "SEGV", "CHLD", "PIPE"):
            await sh(channel, f"kill -{name} 1")
        assert (await sh(channel, "echo alive")).stdout == b"alive\n"
        os.kill(own.pid, signal.SIGTERM)
        await channel.wait_closed()
        await eventually(lambda: own.pids() == [])


async def test_a_tree_is_gathered_without_clone3_too(tmp_path: Path) -> None:
    """Sandbox seccomp profiles answer ENOSYS to it; the child then joins its leaf by itself."""
    require_binary()
    with container(tmp_path, refused_calls=("clone3",)) as own:
        channel = await AgentChannel.connect(own.socket)
        result = await sh(channel, STUBBORN, timeout_s=0.3)
        assert (result.timed_out, own.leaf_pids()) == (True, [])
        left = await sh(channel, "sleep 1000 > /dev/null 2>&1 &")
        assert len(own.leaf_pids()) == 1
        assert await channel.kill(left.exec_id)
        await channel.aclose()


async def test_what_survives_sigkill_is_reported_not_waited_for(tmp_path: Path) -> None:
    """A version 1 freezer holds its processes even against SIGKILL, as a dead disk would."""
    require_binary()
    with limited("freezer", {}) as freezer, container(tmp_path) as own:
        channel = await AgentChannel.connect(own.socket)
        command = asyncio.create_task(sh(channel, "sleep 1000 & echo out; wait", timeout_s=0.5))
        await eventually(lambda: len(own.leaf_pids()) == 2)
        for pid in own.leaf_pids():
            (freezer / "cgroup.procs").write_text(str(pid))
        (freezer / "freezer.state").write_text("FROZEN")
        try:
            result = await command
            assert ExitFlag.SURVIVORS in result.flags
            assert (result.timed_out, result.stdout, result.signal) == (True, b"out\n", 9)
            (info,) = await channel.processes()
            assert info.state is ProcessState.CHILDREN_LEFT
        finally:
            (freezer / "freezer.state").write_text("THAWED")
        await eventually(lambda: own.leaf_pids() == [])
        await channel.ping()
        (info,) = await channel.processes()
        assert info.state is ProcessState.ENDED
        await channel.aclose()


async def test_without_a_cgroup_a_tree_is_its_session_and_descendants(tmp_path: Path) -> None:
    require_binary()
    with plain(tmp_path, arguments=()) as own:
        channel = await AgentChannel.connect(own.socket)
        assert not channel.hello.leaf_cgroups
        tree = "sleep 1000 & setsid sh -c 'sleep 1000 & wait' & wait"
        result = await channel.exec(
            spec("/bin/sh", "-c", tree, timeout_s=0.5, env={"PATH": "/bin"})
        )
        assert result.timed_out
        assert len(own.pids()) == 2  # the agent, and `unshare` waiting for it
        await channel.aclose()
