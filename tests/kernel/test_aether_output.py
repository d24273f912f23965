"""Output: capture limits, rings, credit, and what a new edge finds of what the old one missed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.edge.agent import (
    AgentChannel,
    AgentGoneError,
    AgentRefusedError,
    ErrorCode,
    ExecSpec,
    OutputStream,
    ProcessState,
)
from tests.kernel.aether_sandbox import REPOSITORY, AgentSandbox, plain, require_binary

pytestmark = pytest.mark.kernel
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentSandbox]:
    require_binary()
    with plain(tmp_path_factory.mktemp("a")) as started:
        yield started


@pytest.fixture
async def channel(sandbox: AgentSandbox) -> AsyncIterator[AgentChannel]:
    opened = await AgentChannel.connect(sandbox.socket)
    yield opened
    await opened.aclose()


_ids = iter(range(10**6))
# Ten-byte lines, each its own offset: any loss or repetition is seen.
COUNT = "i=0; while [ $i -lt {lines} ]; do printf '%09d\\n' $((i*10)); i=$((i+1)); done"
FAST = "import sys; sys.stdout.write(''.join('%09d\\n' % (i * 10) for i in range({lines})))"


def spec(*argv: str, **more: object) -> ExecSpec:
    more.setdefault("env", {"PATH": "/usr/bin:/bin"})
    return ExecSpec(exec_id=f"o{next(_ids)}", argv=argv, **more)  # type: ignore[arg-type]


def numbered(lines: int, **more: object) -> ExecSpec:
    return spec(sys.executable, "-c", FAST.format(lines=lines), **more)


def lines(count: int, start: int = 0) -> bytes:
    return b"".join(b"%09d\n" % (index * 10) for index in range(start, count))


async def eventually(check, timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not await check():
            await asyncio.sleep(0.01)


async def has_state(channel: AgentChannel, exec_id: str, state: ProcessState) -> bool:
    return any(p.exec_id == exec_id and p.state is state for p in await channel.processes())


# --- capture ---


async def test_capture_keeps_the_head_and_counts_the_rest(channel: AgentChannel) -> None:
    result = await channel.exec(numbered(50_000, capture_bytes=1000))
    assert result.stdout == lines(100)
    assert (result.stdout_total, result.truncated, result.stdout_dropped) == (500_000, True, 0)


async def test_capture_of_nothing_still_counts(channel: AgentChannel) -> None:
    result = await channel.exec(spec("sh", "-c", "echo hello; echo e >&2", capture_bytes=0))
    assert (result.stdout, result.stdout_total, result.stderr_total) == (b"", 6, 2)


async def test_endless_output_costs_no_memory_and_meets_its_deadline(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    before = sandbox.rss_kib()
    result = await channel.exec(spec("yes", capture_bytes=MIB, timeout_s=1.5))
    assert result.timed_out
    assert len(result.stdout) == MIB
    assert result.stdout_total > 100 * MIB
    assert sandbox.rss_kib() - before < 2 * 1024


async def test_a_whole_mebibyte_on_both_streams_arrives(channel: AgentChannel) -> None:
    script = "head -c 1048576 /dev/zero; head -c 1048576 /dev/zero | tr '\\0' e >&2"
    result = await channel.exec(spec("sh", "-c", script))
    assert (result.stdout, result.stderr) == (bytes(MIB), b"e" * MIB)
    assert not result.truncated


async def test_a_recorded_result_is_replayed_whole(channel: AgentChannel) -> None:
    once = numbered(MIB // 10)
    first = await channel.exec(once)
    again = await channel.collect(once.exec_id)
    assert again.known
    assert again.stdout == first.stdout == lines(MIB // 10)
    assert (again.started_ns, again.ended_ns) == (first.started_ns, first.ended_ns)


async def test_uncaptured_output_streams_at_any_length(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    process = await channel.start(spec("head", "-c", "200M", "/dev/zero", capture_bytes=None))
    received = 0
    async for chunk in process:
        assert chunk.offset == received
        received += len(chunk.data)
    assert received == 200 * MIB
    result = await process.wait()
    assert (result.stdout_total, result.stdout_dropped) == (received, 0)
    assert sandbox.rss_kib() < 8 * 1024


# --- credit ---


async def test_a_reader_that_stops_stops_the_command(channel: AgentChannel) -> None:
    process = await channel.start(numbered(500_000, capture_bytes=None))
    totals: list[int] = []

    async def stalled() -> bool:
        (info,) = [one for one in await channel.processes() if one.exec_id == process.exec_id]
        totals.append(info.stdout_total)
        await asyncio.sleep(0.1)
        return len(totals) > 3 and totals[-1] == totals[-3] > 0

    await eventually(stalled)
    assert totals[-1] < 2 * MIB  # a ring and a little
    assert b"".join([chunk.data async for chunk in process]) == lines(500_000)


async def test_one_stalled_reader_does_not_hold_the_others(channel: AgentChannel) -> None:
    stalled = [await channel.start(spec("yes", capture_bytes=None)) for _ in range(8)]
    result = await channel.exec(numbered(20_000))
    assert result.stdout == lines(20_000)
    for process in stalled:
        await channel.kill(process.exec_id)


async def test_a_stalled_reader_gets_the_end_of_a_killed_command(channel: AgentChannel) -> None:
    process = await channel.start(spec("yes", capture_bytes=None, timeout_s=0.5))
    await asyncio.sleep(0.8)
    received = sum([len(chunk.data) async for chunk in process])
    result = await process.wait()
    assert result.timed_out
    assert received == result.stdout_total


async def test_a_watched_command_is_not_blocked_and_its_tail_is_kept(
    channel: AgentChannel,
) -> None:
    process = await channel.start(numbered(500_000, capture_bytes=None), watch=True)
    result = await process.wait()
    assert result.stdout_total == 5_000_000
    late = await channel.attach(process.exec_id)
    chunks = [chunk async for chunk in late]
    data = b"".join(chunk.data for chunk in chunks)
    assert len(data) >= MIB
    assert data == lines(500_000)[chunks[0].offset :]
    assert (await late.wait()).stdout_dropped == chunks[0].offset


async def test_attach_continues_from_an_offset_in_each_stream(channel: AgentChannel) -> None:
    both = spec("sh", "-c", "printf 0123456789; printf abcdef >&2; sleep 0.2; printf X")
    process = await channel.start(both)
    await eventually(lambda: _totals(channel, both.exec_id, 10, 6))
    moved = await channel.attach(both.exec_id, stdout_offset=7, stderr_offset=2)
    got: dict[OutputStream, bytes] = {OutputStream.STDOUT: b"", OutputStream.STDERR: b""}
    async for chunk in moved:
        got[chunk.stream] += chunk.data
    assert got == {OutputStream.STDOUT: b"789X", OutputStream.STDERR: b"cdef"}
    with pytest.raises(AgentRefusedError) as refused:
        await process.wait()
    assert refused.value.code is ErrorCode.SUPERSEDED


async def _totals(channel: AgentChannel, exec_id: str, stdout: int, stderr: int) -> bool:
    return any(
        (p.exec_id, p.stdout_total, p.stderr_total) == (exec_id, stdout, stderr)
        for p in await channel.processes()
    )


async def test_the_pool_is_shared_and_survives_its_end(tmp_path: Path) -> None:
    """4 MiB for everybody: rings shrink, results give way, nothing is lost that is being read."""
    require_binary()
    with plain(tmp_path, arguments=("--cgroup-fd", "4", "--pool-mib", "4")) as own:
        channel = await AgentChannel.connect(own.socket)
        for _ in range(6):  # more results than fit
            await channel.exec(numbered(100_000))
        results = await asyncio.gather(*(channel.exec(numbered(60_000)) for _ in range(20)))
        assert all(result.stdout == lines(60_000) for result in results)
        assert own.rss_kib() < 6 * 1024
        with pytest.raises(AgentRefusedError) as refused:
            await asyncio.gather(*(channel.start(spec("sleep", "100")) for _ in range(200)))
        assert refused.value.code is ErrorCode.LIMIT
        for info in await channel.processes():
            if info.state is ProcessState.RUNNING:
                await channel.kill(info.exec_id)
        assert (await channel.exec(numbered(10))).stdout == lines(10)
        await channel.aclose()


# --- edges that come and go ---

CRASHING_EDGE = """
import asyncio, sys
sys.path.insert(0, {repository!r})
from services.edge.agent import AgentChannel, ExecSpec

async def main():
    channel = await AgentChannel.connect({path!r})
    process = await channel.start(
        ExecSpec(exec_id="survivor", argv=({python!r}, "-c", {script!r}), capture_bytes=None)
    )
    received = 0
    async for chunk in process:
        received += len(chunk.data)
        if received > 200_000:
            print(received, flush=True)
            await asyncio.sleep(1000)

asyncio.run(main())
"""
# Lines as above, in portions that leave a ring's time for the edge to come back.
SLOW = """
import sys, time
for part in range(40):
    sys.stdout.write(''.join('%09d\\n' % (i * 10) for i in range(part * 2000, part * 2000 + 2000)))
    sys.stdout.flush()
    time.sleep(0.02)
sys.exit(9)
"""


async def test_nothing_is_lost_when_an_edge_is_killed_in_the_middle(
    sandbox: AgentSandbox,
) -> None:
    program = CRASHING_EDGE.format(
        repository=str(REPOSITORY), path=str(sandbox.socket), python=sys.executable, script=SLOW
    )
    edge = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert edge.stdout is not None
    received = int(await asyncio.to_thread(edge.stdout.readline))
    edge.kill()
    edge.wait()
    edge.stdout.close()

    successor = await AgentChannel.connect(sandbox.socket)
    (found,) = [info for info in successor.hello.processes if info.exec_id == "survivor"]
    assert found.stdout_total >= received
    process = await successor.attach("survivor", stdout_offset=received)
    data = b"".join([chunk.data async for chunk in process])
    assert data == lines(80_000)[received:]
    assert (await process.wait()).exit_code == 9
    await successor.aclose()


async def test_a_result_waits_for_an_edge_that_was_away(sandbox: AgentSandbox) -> None:
    first = await AgentChannel.connect(sandbox.socket)
    process = await first.start(spec("sh", "-c", "sleep 0.2; echo late; exit 6"))
    await first.aclose()
    with pytest.raises(AgentGoneError):
        await process.wait()
    await asyncio.sleep(0.5)
    second = await AgentChannel.connect(sandbox.socket)
    assert second.hello.boot_id == first.hello.boot_id
    result = await second.collect(process.exec_id)
    assert (result.stdout, result.exit_code, result.known) == (b"late\n", 6, True)
    await second.aclose()


async def test_the_newest_connection_wins(sandbox: AgentSandbox) -> None:
    old = await AgentChannel.connect(sandbox.socket)
    waiting = asyncio.create_task(old.exec(spec("sleep", "100")))
    await asyncio.sleep(0.05)
    new = await AgentChannel.connect(sandbox.socket)
    assert "superseded" in str(await old.wait_closed())
    with pytest.raises(AgentGoneError):
        await waiting
    for info in new.hello.processes:
        if info.state is ProcessState.RUNNING:
            await new.kill(info.exec_id)
    await new.aclose()


async def test_input_goes_on_through_another_edge(sandbox: AgentSandbox) -> None:
    first = await AgentChannel.connect(sandbox.socket)
    process = await first.start(spec("cat", stdin_pipe=True))
    await process.write(b"first,")
    async for _ in process:
        break
    await first.aclose()
    second = await AgentChannel.connect(sandbox.socket)
    resumed = await second.attach(process.exec_id)
    await second.write_stdin(process.exec_id, b"second")
    await second.close_stdin(process.exec_id)
    assert b"".join([chunk.data async for chunk in resumed]) == b"first,second"
    await second.aclose()


async def test_kept_results_are_bounded_in_number(sandbox: AgentSandbox) -> None:
    channel = await AgentChannel.connect(sandbox.socket)
    oldest = await channel.exec(spec("true"))
    limit = channel.hello.max_records
    for _ in range(limit // 64 + 1):
        await asyncio.gather(*(channel.exec(spec("true")) for _ in range(64)))
    ids = {one.exec_id for one in await channel.processes()}
    assert oldest.exec_id not in ids
    assert len(ids) <= limit + 20  # those of other tests that were never read
    with pytest.raises(AgentRefusedError) as refused:
        await channel.collect(oldest.exec_id)
    assert refused.value.code is ErrorCode.UNKNOWN_EXEC
    await channel.aclose()


async def test_a_busy_past_leaves_a_small_agent(tmp_path: Path) -> None:
    require_binary()
    with plain(tmp_path) as own:
        channel = await AgentChannel.connect(own.socket)
        assert own.rss_kib() < 200
        for _ in range(12):
            await asyncio.gather(*(channel.exec(spec("true")) for _ in range(50)))
        await channel.exec(numbered(300_000, capture_bytes=None))
        await channel.exec(spec("cat", capture_bytes=0), stdin=bytes(8 * MIB))
        await channel.exec(spec("true", "x" * 100_000))
        assert own.rss_kib() < 2048
        await channel.aclose()
