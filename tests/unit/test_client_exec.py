"""Commands: results, streams, lost connections. The commands are real processes of this machine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec import (
    DSecClient,
    ExecTimeout,
    Exited,
    InvalidArgument,
    NotFound,
    Output,
    Sandbox,
    SandboxDead,
    Unavailable,
    Unsupported,
    execution,
)
from libdsec.errors import DeathReason
from libdsec.wire.defaults import INLINE_BYTES
from libdsec.wire.envelope import H_TRACEPARENT
from libdsec.wire.subjects import EXEC
from tests.world.memory import MemoryServer
from tests.world.world import World

# 3 MiB that are recognisable at any offset: lost, doubled or swapped pieces do not go unnoticed.
NUMBERS = "i=0; while [ $i -lt 60000 ]; do printf '%051d\\n' $i; i=$((i+1)); done"
NUMBERED = b"".join(b"%051d\n" % i for i in range(60000))


@pytest.fixture
async def sandbox(client: DSecClient) -> Sandbox:
    return await client.create(image="busybox")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """The intervals in which silence is judged, shortened alike on both sides."""
    monkeypatch.setattr(execution, "SILENCE_S", 0.4)
    monkeypatch.setattr(execution, "_ATTACH_ANSWER_S", 0.2)
    monkeypatch.setattr(execution, "_RETRY_S", 0.05)
    monkeypatch.setattr(execution, "LEASE_S", 0.8)
    world.edge.commands.progress_s = 0.1


async def test_a_list_is_argv_and_a_string_is_shell(sandbox: Sandbox) -> None:
    plain = await sandbox.exec(["echo", "$HOME", "a b"])
    assert (plain.stdout, plain.exit_code, plain.signal) == ("$HOME a b\n", 0, None)
    shell = await sandbox.run_shell("echo out; echo err >&2; exit 3")
    assert (shell.stdout, shell.stderr, shell.exit_code) == ("out\n", "err\n", 3)


async def test_a_signal_is_told_apart_from_an_exit_code(sandbox: Sandbox) -> None:
    result = await sandbox.exec("kill -TERM $$")
    assert (result.exit_code, result.signal) == (143, signal.SIGTERM)


async def test_a_large_result_comes_home_whole(sandbox: Sandbox) -> None:
    result = await sandbox.exec(NUMBERS, max_output_bytes=len(NUMBERED))
    assert result.stdout_bytes == NUMBERED
    assert not result.truncated


async def test_output_beyond_the_cap_is_counted(sandbox: Sandbox) -> None:
    result = await sandbox.exec(NUMBERS, max_output_bytes=1000)
    assert result.stdout_bytes == NUMBERED[:1000]
    assert result.stdout_total == len(NUMBERED)
    assert result.truncated


async def test_callbacks_get_all_text_in_order_and_may_be_coroutines(sandbox: Sandbox) -> None:
    out: list[str] = []
    err: list[str] = []

    async def later(text: str) -> None:
        await asyncio.sleep(0)
        out.append(text)

    result = await sandbox.exec(
        NUMBERS + "; echo end >&2", on_stdout=later, on_stderr=err.append,
        max_output_bytes=8 << 20,
    )  # fmt: skip
    assert "".join(out).encode() == NUMBERED
    assert "".join(err) == "end\n"
    assert result.stdout_bytes == NUMBERED


async def test_a_character_split_over_two_chunks_stays_one(sandbox: Sandbox) -> None:
    heard: list[str] = []
    await sandbox.exec(
        r"printf 'a\303'; sleep 0.2; printf '\251b\377'", on_stdout=heard.append
    )  # fmt: skip
    assert len(heard) > 1
    assert "".join(heard) == "aéb\N{REPLACEMENT CHARACTER}"


async def test_a_timeout_carries_what_was_printed_and_kills_the_tree(sandbox: Sandbox) -> None:
    with pytest.raises(ExecTimeout) as caught:
        await sandbox.exec("echo begun; sleep 60 & echo $!; wait", timeout=0.3)
    result = caught.value.result
    assert result is not None
    begun, child = result.stdout.split()
    assert begun == "begun"
    assert caught.value.request_id
    while alive(int(child)):  # signalled; the kernel may take a moment
        await asyncio.sleep(0.01)


async def test_stdin_small_and_large(sandbox: Sandbox) -> None:
    small = await sandbox.exec(["cat"], stdin="héllo")
    assert small.stdout == "héllo"
    large = await sandbox.exec(["cat"], stdin=NUMBERED, max_output_bytes=len(NUMBERED))
    assert len(NUMBERED) > INLINE_BYTES
    assert large.stdout_bytes == NUMBERED
    unread = await sandbox.exec(["true"], stdin=NUMBERED)
    assert unread.exit_code == 0


async def test_the_same_exec_id_runs_once(world: World, sandbox: Sandbox) -> None:
    first = await sandbox.exec("echo $$", exec_id="once")
    again = await sandbox.exec("echo $$", exec_id="once")
    assert first.stdout == again.stdout
    assert world.edge.commands.dispatched == ["once"]


async def test_a_lost_connection_is_continued_from_where_it_was(
    world: World, sandbox: Sandbox, server: MemoryServer, impatient: None
) -> None:
    heard: list[str] = []

    def cut(text: str) -> None:
        heard.append(text)
        if len(heard) in (3, 9):
            server.cut()
            asyncio.get_running_loop().call_later(0.1, server.restore)

    result = await sandbox.exec(NUMBERS, on_stdout=cut, max_output_bytes=8 << 20)
    assert result.stdout_bytes == NUMBERED
    assert "".join(heard).encode() == NUMBERED
    assert len(world.edge.commands.dispatched) == 1


async def test_a_quiet_command_is_not_a_lost_node(sandbox: Sandbox, impatient: None) -> None:
    result = await sandbox.exec("sleep 1; echo done")
    assert result.stdout == "done\n"


async def test_a_silent_node_is_unavailable_and_named(
    world: World, sandbox: Sandbox, impatient: None
) -> None:
    world.edge.commands.mute.set()
    with pytest.raises(Unavailable, match="node n1") as caught:
        await sandbox.exec("sleep 30")
    assert caught.value.infrastructure
    assert len(world.edge.commands.dispatched) == 1
    world.edge.commands.mute.clear()


async def test_a_node_that_speaks_again_is_listened_to(
    world: World, sandbox: Sandbox, impatient: None
) -> None:
    world.edge.commands.mute.set()
    asyncio.get_running_loop().call_later(0.7, world.edge.commands.mute.clear)
    result = await sandbox.exec("echo $$")
    assert result.exit_code == 0
    assert len(world.edge.commands.dispatched) == 1


async def test_a_command_that_never_arrived_is_not_sent_again(
    world: World, sandbox: Sandbox, impatient: None
) -> None:
    world.edge.commands.lose_before_start = True  # taken from the wire, then nothing
    with pytest.raises(Unavailable, match="node n1"):
        await sandbox.exec(["true"])
    assert world.edge.commands.dispatched == []


async def test_a_restarting_edge_is_waited_for(
    world: World, sandbox: Sandbox, impatient: None
) -> None:
    calls = 0
    run = world.edge.commands.exec

    async def busy_first(request: object, call: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise Unavailable("adopting sandboxes", retry_after_s=0.1)
        return await run(request, call)  # type: ignore[arg-type]

    [serving] = [
        s for bus in world.buses for s in bus.servings
        if s.template.endswith(".exec") and "n1" in s.subject
    ]  # fmt: skip
    await serving.stop()
    await world.buses[0].serve(EXEC, busy_first, project="*", node="n1")  # type: ignore[arg-type]
    assert (await sandbox.exec(["echo", "up"])).stdout == "up\n"
    assert calls == 2


async def test_a_refusal_is_raised_as_it_came(world: World, sandbox: Sandbox) -> None:
    world.edge.commands.refuse = SandboxDead("out of memory", reason=DeathReason.OOM)
    with pytest.raises(SandboxDead) as caught:
        await sandbox.exec(["true"])
    assert caught.value.reason is DeathReason.OOM
    assert caught.value.infrastructure


async def test_a_cancelled_exec_kills_its_command_unless_it_has_an_id(
    world: World, client: DSecClient, sandbox: Sandbox
) -> None:
    for exec_id in (None, "kept"):
        task = asyncio.create_task(sandbox.exec("sleep 60", exec_id=exec_id))
        while len(world.edge.commands.known) < (1 if exec_id is None else 2):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await client.close()
    anonymous, kept = world.edge.commands.known.values()
    assert anonymous.done is not None
    assert anonymous.done.signal == signal.SIGKILL
    assert kept.done is None


async def test_an_exec_is_one_trace_with_its_root_at_the_edge(
    world: World, client: DSecClient, sandbox: Sandbox, server: MemoryServer
) -> None:
    result = await sandbox.exec(["true"])
    [headers] = [h for s, h, _ in server.published if s.endswith(".n1.exec")]
    await client.close()
    [root] = [span for span in world.edge.spans if span.name == "exec"]
    assert headers[H_TRACEPARENT].split("-")[1:3] == [root.trace_id, root.span_id]
    assert root.end_ns > root.start_ns
    assert root.attributes["messaging.message.conversation_id"] == result.request_id


async def test_impossible_commands_are_refused_here(sandbox: Sandbox) -> None:
    for cmd in ([], ["a\0b"], [1]):
        with pytest.raises(InvalidArgument, match="command"):
            await sandbox.exec(cmd)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="timeout"):
        await sandbox.exec(["true"], timeout=-1)
    with pytest.raises(InvalidArgument, match="exec_id"):
        await sandbox.exec(["true"], exec_id="no spaces")
    with pytest.raises(InvalidArgument, match="env"):
        await sandbox.exec(["true"], env={"A=B": "c"})
    with pytest.raises(Unsupported, match="tty"):
        await sandbox.start(["sh"], tty=True)


# --- processes that live on -----------------------------------------------------------------------


@pytest.fixture
async def cat(sandbox: Sandbox) -> AsyncIterator[str]:
    process = await sandbox.start(["cat"], exec_id="cat")
    yield process.exec_id
    await process.kill()


async def test_a_process_is_written_to_read_and_waited_for(sandbox: Sandbox) -> None:
    process = await sandbox.start("read line; echo got $line; cat; exit 4")
    assert process.pid > 0
    await process.write("one\n")
    await process.write(b"two\n")
    await process.close_stdin()
    events = [event async for event in process]
    assert b"".join(e.data for e in events if isinstance(e, Output)) == b"got one\ntwo\n"
    assert isinstance(events[-1], Exited)
    assert events[-1].result.exit_code == 4
    assert (await process.wait()).stdout == "got one\ntwo\n"


async def test_a_process_is_found_again_by_another_client(
    cat: str, sandbox: Sandbox, memory: MemoryServer
) -> None:
    mine = await sandbox.attach(cat)
    await mine.write("first ")
    async with DSecClient(["memory://"]) as other:
        theirs = await (await other.connect(sandbox.id)).attach(cat)
        assert theirs.pid == mine.pid
        await theirs.write("second")  # goes on where the input is, not at its beginning
        await theirs.close_stdin()
        assert (await theirs.wait()).stdout == "first second"
        later = await (await (await other.connect(sandbox.id)).attach(cat, 6)).wait()
        assert (later.stdout, later.stdout_total, later.truncated) == ("second", 12, False)


async def test_processes_are_listed_and_a_kill_is_final(cat: str, sandbox: Sandbox) -> None:
    assert [(p.exec_id, p.running) for p in await sandbox.processes()] == [(cat, True)]
    process = await sandbox.attach(cat)
    await process.kill()
    await process.kill()
    assert (await process.wait()).signal == signal.SIGKILL
    assert [p.running for p in await sandbox.processes()] == [False]


async def test_an_unknown_process_is_not_found(sandbox: Sandbox) -> None:
    with pytest.raises(NotFound, match="nothing"):
        await sandbox.attach("nothing")


async def test_a_slow_reader_holds_a_process_back_and_loses_nothing(
    world: World, sandbox: Sandbox
) -> None:
    process = await sandbox.start(NUMBERS, stdin=b"")
    collected = bytearray()
    async for event in process:
        if isinstance(event, Output):
            assert event.offset == len(collected)
            collected += event.data
            await asyncio.sleep(0.001)
    assert bytes(collected) == NUMBERED


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
