"""Sandboxes on this host's kernel: started, used, limited, paused, ended, and nothing left."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec.errors import (
    Conflict,
    DeathReason,
    InvalidArgument,
    NotFound,
    SandboxDead,
)
from libdsec.wire import defaults as d
from libdsec.wire.execution import AttachExec, ExecCredit, ExecRequest
from libdsec.wire.files import FilePath, FileRead, FileSymlink, FileWrite
from libdsec.wire.sandbox import Lifetime, NetworkAllow, PolicySpec, Resources, State
from services.edge.files import Files
from services.edge.processes import Processes
from services.edge.sandbox import Sandbox
from services.edge.transfer import Transfers

from .edge_parts import Caller, Parts, edge_parts

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root"),
    pytest.mark.skipif(shutil.which("crun") is None, reason="crun is not installed"),
]


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    async with edge_parts() as parts:
        yield parts


def traces(parts: Parts, sandbox_id: str) -> dict[str, object]:
    """Where the host still shows something of a sandbox; empty when nothing is left."""
    host = parts.node.host
    paths = host.paths.sandbox(sandbox_id)
    layers = [
        i.digest for i in parts.base.all if sandbox_id in parts.node.layers.users_of(i.digest)
    ]
    found = {
        "state": paths.state_dir.exists(),
        "run": paths.run_dir.exists(),
        "crun": paths.crun_dir.exists(),
        "cgroup": sandbox_id in host.cgroups.list_ids(),
        "interface": (Path("/sys/class/net") / paths.interface).exists(),
        "policy": sandbox_id in parts.policy.in_force,
        "layers": layers,
        "loop": [p for p in loops() if sandbox_id in p],
        "table": parts.table.get(sandbox_id) is not None,
    }
    return {name: what for name, what in found.items() if what}


def loops() -> list[str]:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [file.read_text() for file in files if file.exists()]


async def test_a_sandbox_runs_commands_and_leaves_nothing(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    done = await parts.run(sandbox, "echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    death = await parts.lifecycle.end(sandbox, DeathReason.STOPPED)
    assert death.reason is DeathReason.STOPPED
    assert traces(parts, sandbox.id) == {}
    assert [state for _, state, _ in parts.changes] == [State.ACCEPTED, State.READY, State.DEAD]
    with pytest.raises(SandboxDead) as caught:
        await parts.run(sandbox, "true")
    assert caught.value.reason is DeathReason.STOPPED


async def test_it_knows_its_name_and_the_names_its_policy_gives(parts: Parts) -> None:
    parts.policy.hosts = {"mirror.internal": "169.254.77.1"}
    sandbox = await parts.sandbox()
    name = sandbox.id.rpartition("_")[2]
    done = await parts.run(sandbox, "hostname; cat /etc/hostname; grep mirror /etc/hosts")
    assert done.stdout.decode().split() == [name, name, "169.254.77.1", "mirror.internal"]


async def test_every_phase_of_a_create_is_timed(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    assert {"layers", "network", "policy", "start", "ready"} <= set(sandbox.status.phases_ms)


async def test_a_command_beyond_the_memory_limit_is_a_result_that_says_so(parts: Parts) -> None:
    sandbox = await parts.sandbox(resources=Resources(memory_mib=32, disk_mib=32, shm_mib=16))
    killed = await parts.run(sandbox, "exec tail /dev/zero")
    assert (killed.exit_code, killed.signal, killed.oom_killed) == (137, 9, True)
    assert (await parts.run(sandbox, "echo alive")).stdout == b"alive\n"


async def test_a_sandbox_whose_first_process_is_killed_for_memory_died_of_oom(parts: Parts) -> None:
    # Shared memory belongs to nobody, so killing commands frees none of it, and what they print
    # the agent has to keep: in the end there is nobody else to kill.
    resources = Resources(memory_mib=16, disk_mib=32, shm_mib=64, pids=64)
    sandbox = await parts.sandbox(resources=resources)
    await parts.run(sandbox, "dd if=/dev/zero of=/dev/shm/x bs=1M count=12")

    async def print_much() -> None:
        for _ in range(40):
            await parts.run(sandbox, "cat /dev/zero | head -c 1000000", timeout_s=20)

    with pytest.raises(SandboxDead) as caught:
        await print_much()
    assert caught.value.reason is DeathReason.OOM
    assert traces(parts, sandbox.id) == {}


async def test_processes_and_disk_are_limited(parts: Parts) -> None:
    sandbox = await parts.sandbox(resources=Resources(memory_mib=64, disk_mib=16, pids=16))
    forks = await parts.run(sandbox, "for i in $(seq 40); do sleep 60 & done; echo $(jobs | wc -l)")
    assert b"can't fork" in forks.stderr or b"Resource temporarily" in forks.stderr
    full = await parts.run(sandbox, "dd if=/dev/zero of=/big bs=1M count=64")
    assert full.exit_code != 0
    assert b"No space left" in full.stderr
    size = int((await parts.run(sandbox, "stat -c %s /big")).stdout)
    assert size <= 17 << 20


async def test_a_first_process_killed_from_outside_is_noticed_by_itself(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    running = asyncio.create_task(parts.run(sandbox, "sleep 100"))
    await until_running(parts, sandbox, 1)
    assert sandbox.holding.process is not None
    signal.pidfd_send_signal(sandbox.holding.process.pidfd, signal.SIGKILL)
    async with asyncio.timeout(10):
        assert (await asyncio.shield(sandbox.gone)).reason is DeathReason.KILLED
        with pytest.raises(SandboxDead) as caught:
            await running
    assert caught.value.reason is DeathReason.KILLED
    assert traces(parts, sandbox.id) == {}


async def test_idle_and_lifetime_end_it_and_a_command_in_progress_does_not(parts: Parts) -> None:
    short = Lifetime(idle_timeout_s=0.5, max_lifetime_s=100, max_paused_s=100)
    sandbox = await parts.sandbox(lifetime=short)
    await parts.run(sandbox, "sleep 1.2")
    assert sandbox.usable
    async with asyncio.timeout(5):
        assert (await asyncio.shield(sandbox.gone)).reason is DeathReason.EXPIRED
    brief = Lifetime(idle_timeout_s=100, max_lifetime_s=0.7, max_paused_s=100)
    sandbox = await parts.sandbox(lifetime=brief)
    with pytest.raises(SandboxDead) as caught:
        await parts.run(sandbox, "sleep 30")
    assert caught.value.reason is DeathReason.EXPIRED


async def test_a_paused_sandbox_stands_still_and_a_command_resumes_it(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    request = ExecRequest(
        sandbox_id=sandbox.id, exec_id="count", detach=True,
        shell="i=0; while :; do i=$((i+1)); echo $i > /n; sleep 0.02; done",
    )  # fmt: skip
    assert await parts.execs.exec(request, Caller()) is None
    await until_written(parts, sandbox)
    paused = await parts.pauses.pause(sandbox, reclaim=True)
    assert paused.state is State.PAUSED
    assert sandbox.holding.cgroup is not None
    assert sandbox.holding.cgroup.is_frozen()
    await asyncio.sleep(0.1)  # what was used before is accounted a moment later
    used = sandbox.holding.cgroup.stats().cpu_usage_us
    await asyncio.sleep(0.4)
    assert sandbox.holding.cgroup.stats().cpu_usage_us - used < 4_000  # of 400,000
    first = int((await parts.run(sandbox, "cat /n")).stdout)
    assert not sandbox.paused
    await asyncio.sleep(0.2)
    assert int((await parts.run(sandbox, "cat /n")).stdout) > first
    assert sandbox.clocks.life.read(parts.node.clock.monotonic_s()) < sandbox.clocks.life.limit_s


async def test_paused_time_does_not_count_against_a_commands_timeout(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    running = asyncio.create_task(parts.run(sandbox, "sleep 1; echo done", timeout_s=1.6))
    await until_running(parts, sandbox, 1)
    await parts.pauses.pause(sandbox, reclaim=False)
    await asyncio.sleep(1.2)
    await parts.pauses.resume(sandbox)
    done = await running
    assert (done.timed_out, done.stdout) == (False, b"done\n")


async def test_a_paused_sandbox_can_be_stopped_and_expires(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    await parts.pauses.pause(sandbox, reclaim=False)
    await parts.lifecycle.end(sandbox, DeathReason.STOPPED)
    assert traces(parts, sandbox.id) == {}
    lifetime = Lifetime(idle_timeout_s=100, max_lifetime_s=100, max_paused_s=0.4)
    sandbox = await parts.sandbox(lifetime=lifetime)
    await parts.pauses.pause(sandbox, reclaim=False)
    async with asyncio.timeout(5):
        assert (await asyncio.shield(sandbox.gone)).reason is DeathReason.EXPIRED


async def test_an_exec_id_runs_once(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    for attempt in range(3):
        done = await parts.run(sandbox, "echo x >> /log; wc -l < /log", exec_id="once")
        assert (done.stdout.strip(), done.recorded) == (b"1", attempt > 0)
    with pytest.raises(Conflict):
        await parts.run(sandbox, "echo other", exec_id="once")


async def test_a_timeout_ends_the_whole_tree_and_keeps_what_was_printed(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    done = await parts.run(sandbox, "echo begun; sleep 100 & sleep 100", timeout_s=0.5)
    assert (done.timed_out, done.stdout) == (True, b"begun\n")
    assert (await parts.run(sandbox, "pidof sleep")).exit_code == 1


async def test_a_caller_that_goes_away_leaves_the_command_running(parts: Parts) -> None:
    sandbox = await parts.sandbox(lifetime=Lifetime(idle_timeout_s=0.6))
    running = asyncio.create_task(
        parts.run(sandbox, "sleep 1.5; echo end", exec_id="left", timeout_s=30)
    )
    await until_running(parts, sandbox, 1)
    running.cancel()
    await asyncio.wait({running})
    await asyncio.sleep(1.0)
    assert sandbox.usable  # not idle: the command still runs
    attached = await parts.execs.attach(AttachExec(sandbox_id=sandbox.id, exec_id="left"), Caller())
    assert attached is not None
    assert attached.stdout == b"end\n"
    assert attached.exit_code == 0


async def test_large_output_is_streamed_on_credit_and_complete(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    caller, size = Caller(), 5 << 20
    command = f"head -c {size} /dev/zero | tr '\\0' x"
    running = asyncio.create_task(
        parts.run(sandbox, command, caller=caller, exec_id="big", max_output_bytes=size)
    )
    async with asyncio.timeout(20):
        while not running.done():
            await asyncio.sleep(0.01)
            got = len(caller.output())
            assert got <= size
            credit = ExecCredit(sandbox_id=sandbox.id, exec_id="big", consumed_bytes=got)
            await parts.execs.credit(credit, Caller())
    done = running.result()
    assert (done.stdout, done.stdout_total, done.truncated) == (b"", size, False)
    assert caller.output() == b"x" * size


async def test_without_credit_a_command_waits_and_nothing_piles_up(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    caller = Caller()
    running = asyncio.create_task(
        parts.run(
            sandbox,
            "yes | head -c 20000000; echo end >&2",
            caller=caller,
            exec_id="slow",
            max_output_bytes=32 << 20,
        )
    )
    await asyncio.sleep(1.0)
    assert not running.done()
    assert len(caller.output()) <= d.EXEC_WINDOW_BYTES
    running.cancel()
    await asyncio.wait({running})


async def test_output_beyond_the_cap_is_counted_not_kept(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    done = await parts.run(sandbox, "head -c 3000000 /dev/zero", max_output_bytes=1000)
    assert (len(done.stdout), done.stdout_total, done.truncated) == (1000, 3_000_000, True)


async def test_input_follows_a_command_and_repeats_are_skipped(parts: Parts) -> None:
    from libdsec.wire.execution import ProcessInput

    sandbox = await parts.sandbox()
    processes = Processes(parts.node, parts.table, parts.pauses)
    running = asyncio.create_task(
        parts.run(sandbox, "cat", exec_id="cat", stdin=b"one ", stdin_open=True)
    )
    await until_running(parts, sandbox, 1)
    send = {"sandbox_id": sandbox.id, "exec_id": "cat"}
    await processes.input(ProcessInput(**send, offset=4, data=b"two "), Caller())
    await processes.input(ProcessInput(**send, offset=4, data=b"two "), Caller())
    with pytest.raises(InvalidArgument, match="8 bytes"):
        await processes.input(ProcessInput(**send, offset=100, data=b"late"), Caller())
    await processes.input(ProcessInput(**send, offset=6, data=b"o three", close=True), Caller())
    assert (await running).stdout == b"one two three"


async def test_a_signal_reaches_the_tree_and_the_listing_shows_what_runs(parts: Parts) -> None:
    from libdsec.wire.execution import ProcessSignal
    from libdsec.wire.sandbox import ById

    sandbox = await parts.sandbox()
    processes = Processes(parts.node, parts.table, parts.pauses)
    running = asyncio.create_task(parts.run(sandbox, "sleep 99 & sleep 99", exec_id="tree"))
    await until_running(parts, sandbox, 1)
    listing = await processes.list(ById(sandbox_id=sandbox.id), Caller())
    (shown,) = [p for p in listing.processes if p.exec_id == "tree"]
    assert shown.running
    assert shown.argv[:2] == ("/bin/sh", "-c")
    kill = ProcessSignal(sandbox_id=sandbox.id, exec_id="tree", signal=9, tree=True)
    await processes.signal(kill, Caller())
    assert (await running).exit_code == 137
    assert (await parts.run(sandbox, "pidof sleep")).exit_code == 1
    await processes.signal(kill, Caller())  # nothing is left: as good as done
    with pytest.raises(NotFound):
        await processes.signal(kill.model_copy(update={"exec_id": "never"}), Caller())


async def test_files_go_in_and_out_whole(parts: Parts, tmp_path: Path) -> None:
    sandbox = await parts.sandbox()
    transfers = Transfers(parts.node, tmp_path)
    files = Files(parts.table, parts.pauses, transfers)
    where = {"sandbox_id": sandbox.id, "path": "/root/data"}
    data = os.urandom(700_000)
    step = d.FILE_CHUNK_BYTES
    for offset in range(0, len(data), step):
        chunk = FileWrite(
            **where, transfer_id="t1", offset=offset, data=data[offset : offset + step],
            last=offset + step >= len(data), mode=0o640,
        )  # fmt: skip
        await files.write(chunk, Caller())
        if not chunk.last:
            assert (await parts.run(sandbox, "ls /root")).stdout == b""
    read = b""
    versions = set()
    while True:
        got = await files.read(FileRead(**where, offset=len(read), max_bytes=1 << 20), Caller())
        read += got.data
        versions.add(got.version)
        if got.eof:
            break
    assert read == data
    assert len(versions) == 1
    stat = await files.stat(FilePath(**where), Caller())
    assert (stat.kind, stat.size_bytes, stat.mode) == ("file", len(data), 0o640)
    link = FileSymlink(sandbox_id=sandbox.id, path="/root/link", target="/etc/passwd")
    await files.symlink(link, Caller())
    listing = await files.list(FilePath(sandbox_id=sandbox.id, path="/root"), Caller())
    kinds = {entry.path: (entry.kind, entry.target) for entry in listing.entries}
    assert kinds == {"data": ("file", None), "link": ("link", "/etc/passwd")}
    with pytest.raises(FileNotFoundError):
        await files.stat(FilePath(sandbox_id=sandbox.id, path="/no/such"), Caller())
    with pytest.raises(IsADirectoryError):
        await files.read(FileRead(sandbox_id=sandbox.id, path="/root", max_bytes=1), Caller())
    transfers.close()


async def test_another_project_finds_nothing(parts: Parts) -> None:
    sandbox = await parts.sandbox()
    request = ExecRequest(sandbox_id=sandbox.id, exec_id="e", argv=("true",))
    with pytest.raises(NotFound):
        await parts.execs.exec(request, Caller("q"))


async def test_a_network_is_given_with_its_gate_and_taken_back(parts: Parts) -> None:
    allow = PolicySpec(network=NetworkAllow(rules=("tcp:10.0.0.5:443",)))
    sandbox = await parts.sandbox(policy=allow)
    applied = parts.policy.in_force[sandbox.id]
    assert applied.ifindex is not None
    shown = await parts.run(sandbox, "ip addr show eth0; ip route")
    assert f"{applied.address}/32" in shown.stdout.decode()
    assert b"default via 169.254.77.1" in shown.stdout
    bare = await parts.sandbox()
    assert parts.policy.in_force[bare.id].ifindex is None
    assert b"eth0" not in (await parts.run(bare, "ls /sys/class/net; ip link")).stdout
    for one in (sandbox, bare):
        await parts.lifecycle.end(one, DeathReason.STOPPED)
        assert traces(parts, one.id) == {}


async def until_running(parts: Parts, sandbox: Sandbox, count: int) -> None:
    """Until the agent has so many commands alive."""
    async with asyncio.timeout(5):
        while True:
            channel = await sandbox.holding.agent.channel()
            if sum(p.pid is not None for p in await channel.processes()) >= count:
                return
            await asyncio.sleep(0.01)


async def until_written(parts: Parts, sandbox: Sandbox) -> None:
    async with asyncio.timeout(5):
        while not (await parts.run(sandbox, "cat /n")).stdout:
            await asyncio.sleep(0.02)
