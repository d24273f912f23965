"""Commands in a crun container: what runs, as whom, with what, and how its end is told."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.edge.agent import (
    AgentChannel,
    AgentRefusedError,
    AgentResult,
    ErrorCode,
    ExecSpec,
    ExitReason,
    KillScope,
    Stage,
)
from tests.kernel.aether_sandbox import AgentSandbox, container, require_binary

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
    await opened.aclose()


_ids = iter(range(10**6))


def spec(*argv: str | bytes, **more: object) -> ExecSpec:
    return ExecSpec(exec_id=f"c{next(_ids)}", argv=argv, **more)  # type: ignore[arg-type]


async def sh(channel: AgentChannel, text: str, **more: object) -> AgentResult:
    return await channel.exec(spec("/bin/sh", "-c", text, **more))


async def test_output_and_exit_code_are_exact(channel: AgentChannel) -> None:
    result = await sh(channel, r"printf 'a\000\377b'; printf err >&2; exit 7")
    assert (result.stdout, result.stderr, result.exit_code) == (b"a\0\xffb", b"err", 7)
    assert (result.reason, result.signal, result.truncated) == (ExitReason.EXITED, None, False)
    assert (result.stdout_total, result.stderr_total) == (4, 3)
    assert 0 < result.duration_s < 30


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
async def test_death_by_signal_is_128_plus_the_signal(channel: AgentChannel, number: int) -> None:
    result = await sh(channel, f"kill -{number:d} $$")
    assert (result.exit_code, result.signal) == (128 + number, number)
    assert result.reason is ExitReason.SIGNALLED


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("absent-program",), 127),
        (("/bin/absent",), 127),
        (("/etc/passwd",), 126),
        (("/etc",), 126),
        (("/bin/sh/below",), 127),
        (("",), 127),
    ],
)
async def test_what_cannot_be_executed_is_a_result(
    channel: AgentChannel, argv: tuple[str, ...], code: int
) -> None:
    result = await channel.exec(spec(*argv))
    assert (result.exit_code, result.reason) == (code, ExitReason.NOT_STARTED)
    assert result.stage is Stage.EXEC


async def test_a_script_without_interpreter_is_not_executable(
    channel: AgentChannel,
) -> None:
    await channel.files.write("/tmp/script", b"echo hi\n", mode=0o755)
    result = await channel.exec(spec("/tmp/script"))
    assert (result.exit_code, result.stage) == (126, Stage.EXEC)


async def test_path_of_the_given_environment_is_searched(channel: AgentChannel) -> None:
    await channel.files.make_dir("/tmp/mine")
    await channel.files.write("/tmp/mine/tool", b"#!/bin/sh\necho found\n", mode=0o755)
    result = await channel.exec(spec("tool", env={"PATH": "/absent:/etc/passwd:/tmp/mine"}))
    assert result.stdout == b"found\n"


async def test_environment_is_the_one_given_and_home(channel: AgentChannel) -> None:
    environment = {"A": "1", "EMPTY": "", "NAME": "ü=x"}
    result = await channel.exec(spec("/bin/env", env=environment))
    lines = result.stdout.decode().splitlines()
    assert sorted(lines) == ["A=1", "EMPTY=", "HOME=/root", "NAME=ü=x"]
    result = await channel.exec(spec("/bin/env", env={"HOME": "/elsewhere"}))
    assert result.stdout == b"HOME=/elsewhere\n"


async def test_a_megabyte_of_arguments_and_environment(channel: AgentChannel) -> None:
    argv = ["/bin/sh", "-c", 'echo $# "${#BIG}"', "x", *("y" * 99_999 for _ in range(10))]
    result = await channel.exec(spec(*argv, env={"BIG": "z" * 100_000}))
    assert result.stdout == b"10 100000\n"


async def test_an_argument_list_above_the_kernels_limit_is_told(channel: AgentChannel) -> None:
    result = await channel.exec(spec("/bin/true", "y" * 200_000))
    assert (result.exit_code, result.errno) == (126, 7)  # E2BIG


async def test_working_directory(channel: AgentChannel) -> None:
    assert (await channel.exec(spec("/bin/pwd", cwd="/home/alice"))).stdout == b"/home/alice\n"
    assert (await channel.exec(spec("/bin/pwd", cwd=""))).stdout == b"/\n"
    absent = await channel.exec(spec("/bin/pwd", cwd="/absent"))
    assert (absent.exit_code, absent.stage, absent.errno) == (126, Stage.CWD, 2)


async def test_stdin_is_empty_unless_given(channel: AgentChannel) -> None:
    assert (await channel.exec(spec("/bin/cat"))).stdout == b""
    link = await sh(channel, "readlink /proc/self/fd/0")
    assert link.stdout == b"/dev/null\n"
    assert (await channel.exec(spec("/bin/cat"), stdin=b"in\0put")).stdout == b"in\0put"


async def test_stdin_larger_than_every_buffer(channel: AgentChannel) -> None:
    data = bytes(range(256)) * 16384
    result = await channel.exec(spec("/bin/cat", capture_bytes=None), stdin=data)
    assert result.stdout == data


async def test_stdin_that_nobody_reads_does_not_hold_the_command(channel: AgentChannel) -> None:
    result = await channel.exec(spec("/bin/true"), stdin=b"x" * 3_000_000)
    assert result.exit_code == 0


async def test_descriptors_umask_and_session_are_clean(channel: AgentChannel) -> None:
    result = await sh(
        channel, "ls /proc/self/fd; umask; ulimit -n; cut -d' ' -f1,5,6 /proc/$$/stat"
    )
    *fds, umask, files, ids = result.stdout.decode().split("\n")[:-1]
    assert set(fds) == {"0", "1", "2", "3"}  # 3 is ls reading the directory
    assert (umask, files) == ("0022", "1024")
    pid, group, session = ids.split()
    assert pid == group == session


async def test_signals_are_at_their_defaults(channel: AgentChannel) -> None:
    result = await channel.exec(spec("/bin/grep", "-E", "Sig(Blk|Ign|Cgt)", "/proc/self/status"))
    assert {line.split()[1] for line in result.stdout.decode().splitlines()} == {"0" * 16}


# --- users ---


async def identity(channel: AgentChannel, user: str) -> str:
    result = await sh(channel, "id -u; id -g; id -G; echo $HOME", user=user)
    assert result.exit_code == 0, result
    return " ".join(result.stdout.decode().split("\n")[:-1])


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("", "0 0 0 /root"),
        ("root", "0 0 0 /root"),
        ("alice", "1000 1000 1000 44 50 /home/alice"),
        ("1000", "1000 1000 1000 44 50 /home/alice"),
        ("alice:staff", "1000 50 50 /home/alice"),
        ("alice:7", "1000 7 7 /home/alice"),
        ("4242", "4242 0 0 /"),
        ("4242:4343", "4242 4343 4343 /"),
    ],
)
async def test_user_is_resolved_in_the_sandboxs_own_files(
    channel: AgentChannel, user: str, expected: str
) -> None:
    assert await identity(channel, user) == expected


@pytest.mark.parametrize(
    "user", ["nobody-here", "alice:nogroup", "4294967295", "-1", "alice:", "x" * 300]
)
async def test_an_unknown_user_is_told_and_nothing_runs(channel: AgentChannel, user: str) -> None:
    result = await sh(channel, "echo ran", user=user)
    assert (result.stage, result.exit_code, result.stdout) == (Stage.USER, 126, b"")


async def test_cwd_is_entered_as_the_user(channel: AgentChannel) -> None:
    await channel.files.make_dir("/tmp/closed", mode=0o700)
    result = await sh(channel, "pwd", user="alice", cwd="/tmp/closed")
    assert (result.stage, result.errno) == (Stage.CWD, 13)


async def test_user_files_that_are_not_files_do_not_hang(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    passwd = sandbox.root / "etc" / "passwd"
    kept = passwd.read_bytes()
    try:
        for replacement in (
            "mkfifo /etc/passwd",
            "ln -s /dev/zero /etc/passwd",
            "mkdir /etc/passwd",
        ):
            await sh(channel, f"rm -rf /etc/passwd; {replacement}")
            named = await channel.exec(spec("/bin/true", user="alice"))
            assert named.stage is Stage.USER
            assert (await channel.exec(spec("/bin/true", user="0"))).exit_code == 0
    finally:
        await sh(channel, "rm -rf /etc/passwd")
        passwd.write_bytes(kept)


async def test_capabilities_of_root_and_of_others(channel: AgentChannel) -> None:
    show = "grep -E 'Cap(Inh|Prm|Eff|Bnd|Amb)' /proc/self/status"
    root = dict(line.split() for line in (await sh(channel, show)).stdout.decode().splitlines())
    alice = dict(
        line.split()
        for line in (await sh(channel, show, user="alice")).stdout.decode().splitlines()
    )
    bounding = int(root["CapBnd:"], 16)
    usual = {0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31}
    assert {bit for bit in range(64) if bounding >> bit & 1} == usual
    assert root["CapEff:"] == root["CapPrm:"] == root["CapBnd:"]
    assert alice["CapEff:"] == alice["CapPrm:"] == root["CapAmb:"] == root["CapInh:"] == "0" * 16


async def test_no_new_privs_is_per_command(channel: AgentChannel) -> None:
    show = ("/bin/grep", "NoNewPrivs", "/proc/self/status")
    assert (await channel.exec(spec(*show))).stdout.split()[1] == b"0"
    assert (await channel.exec(spec(*show, no_new_privs=True))).stdout.split()[1] == b"1"


# --- idempotence ---


async def test_a_repeat_gets_the_recorded_result(channel: AgentChannel) -> None:
    once = spec("/bin/sh", "-c", "echo x >> /tmp/runs; wc -l < /tmp/runs; exit 3")
    first, second = await channel.exec(once), await channel.exec(once)
    assert (first.stdout, first.exit_code, first.known) == (b"1\n", 3, False)
    assert (second.stdout, second.exit_code, second.known) == (b"1\n", 3, True)
    assert (await channel.files.read("/tmp/runs")).data == b"x\n"


async def test_a_repeat_while_it_runs_attaches(channel: AgentChannel) -> None:
    once = spec("/bin/sh", "-c", "echo begun; cat > /dev/null; echo done", stdin_pipe=True)
    process = await channel.start(once)
    again = asyncio.create_task(channel.exec(once, stdin=b""))
    with pytest.raises(AgentRefusedError) as refused:
        await process.wait()
    assert refused.value.code is ErrorCode.SUPERSEDED
    result = await again
    assert (result.stdout, result.known) == (b"begun\ndone\n", True)


async def test_a_repeat_does_not_feed_its_input_twice(channel: AgentChannel) -> None:
    data = bytes(range(256)) * 1000
    once = spec("/bin/sh", "-c", "cat; cat", stdin_pipe=True, capture_bytes=None)
    process = await channel.start(once)
    await process.write(data[:30_000])
    result = await channel.exec(once, stdin=data)
    assert result.stdout == data


async def test_another_digest_for_the_same_id_is_a_conflict(channel: AgentChannel) -> None:
    await channel.exec(ExecSpec(exec_id="digested", argv=("true",), digest=5))
    with pytest.raises(AgentRefusedError) as refused:
        await channel.exec(ExecSpec(exec_id="digested", argv=("false",), digest=6))
    assert refused.value.code is ErrorCode.CONFLICT
    assert (await channel.exec(ExecSpec(exec_id="digested", argv=("true",), digest=5))).known


async def test_collect_never_runs_anything(channel: AgentChannel) -> None:
    with pytest.raises(AgentRefusedError) as refused:
        await channel.collect("never-started")
    assert refused.value.code is ErrorCode.UNKNOWN_EXEC


# --- many at once, processes, signals ---


async def test_five_hundred_commands_at_once(channel: AgentChannel) -> None:
    async def one(number: int) -> bool:
        result = await channel.exec(
            spec("/bin/sh", "-c", f"echo {number}; read x; echo $x"), stdin=b"in\n"
        )
        return result.stdout == f"{number}\nin\n".encode() and result.exit_code == 0

    begun = [await channel.start(spec("/bin/cat", stdin_pipe=True)) for _ in range(500)]
    assert sum(info.pid is not None for info in await channel.processes()) == 500
    assert await one(-1)  # and another one besides
    for process in begun:
        process.close_stdin()
    assert {(await process.wait()).exit_code for process in begun} == {0}
    assert all(await asyncio.gather(*(one(number) for number in range(500))))


async def test_kill_by_signal_reaches_the_group(channel: AgentChannel) -> None:
    process = await channel.start(
        spec("/bin/sh", "-c", "trap 'echo caught; exit 5' TERM; sleep 100 & wait")
    )
    await asyncio.sleep(0.1)
    assert await channel.kill(process.exec_id, signal.SIGTERM, scope=KillScope.GROUP)
    chunks = [chunk.data async for chunk in process]
    assert b"".join(chunks) == b"caught\n"
    assert (await process.wait()).exit_code == 5
    assert not await channel.kill(process.exec_id)


async def test_processes_names_what_runs(channel: AgentChannel, sandbox: AgentSandbox) -> None:
    process = await channel.start(spec("/bin/sleep", "100"))
    (info,) = [one for one in await channel.processes() if one.exec_id == process.exec_id]
    assert info.pid == process.pid
    assert len(sandbox.leaf_pids()) == 1
    await channel.kill(process.exec_id)
    assert sandbox.leaf_pids() == []


async def test_output_of_a_callback_comes_in_order(channel: AgentChannel) -> None:
    seen: list[tuple[int, int, bytes]] = []
    one = spec("/bin/sh", "-c", "for i in 1 2 3; do echo $i; echo e$i >&2; usleep 20000; done")
    result = await channel.exec(one, on_output=lambda *chunk: seen.append(chunk))
    assert (result.stdout, result.stderr) == (b"1\n2\n3\n", b"e1\ne2\ne3\n")
    for stream, whole in ((1, result.stdout), (2, result.stderr)):
        parts = [(offset, data) for which, offset, data in seen if which == stream]
        assert b"".join(data for _, data in parts) == whole
        assert len(parts) >= 2
        assert [offset for offset, _ in parts] == sorted(offset for offset, _ in parts)


async def test_an_image_without_anything_still_has_an_agent(tmp_path: Path) -> None:
    require_binary()
    with container(tmp_path, empty=True) as bare:
        channel = await AgentChannel.connect(bare.socket)
        result = await channel.exec(spec("/bin/sh", "-c", "true"))
        assert (result.exit_code, result.stage) == (127, Stage.EXEC)
        await channel.files.write("/hello", b"x")
        assert (await channel.files.read("/hello")).data == b"x"
        assert {entry.name for entry in (await channel.files.list("/")).entries} >= {
            "hello",
            "proc",
        }
        await channel.aclose()
