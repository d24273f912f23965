"""What a sandbox must do, whatever its backend, as its owner sees it through the client.

A backend's test module inherits these classes and gives two fixtures: `sandbox`, one that may be
shared by all cases of a class, and `home`, a directory inside it that exists and is writable, new
for each case. Inside there are /bin/sh and the usual small tools; the user is the image's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from libdsec import (
    Conflict,
    DSecError,
    ExecResult,
    ExecTimeout,
    Exited,
    FileNotFound,
    InvalidArgument,
    IsADirectory,
    NotADirectory,
    NotFound,
    Output,
    Sandbox,
    SandboxDead,
)
from libdsec.wire.defaults import FILE_CHUNK_BYTES
from libdsec.wire.sandbox import State

# Recognisable at any offset: what is lost, doubled or swapped does not go unnoticed.
NUMBERS = "i=0; while [ $i -lt 20000 ]; do printf '%051d\\n' $i; i=$((i+1)); done"
NUMBERED = b"".join(b"%051d\n" % i for i in range(20000))
BYTES = bytes(range(256))


class Cases:
    """The fixtures a backend must give."""

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        raise NotImplementedError

    @pytest.fixture
    def home(self) -> str:
        raise NotImplementedError


class CommandCases(Cases):
    """exec."""

    async def test_a_list_is_argv_untouched(self, sandbox: Sandbox) -> None:
        words = ["", " ", "a b", "*", "$HOME", "'", '"', "\\", "ü", "-n", "line\nline"]
        result = await sandbox.exec(["printf", "<%s>", *words])
        assert result.stdout == "".join(f"<{word}>" for word in words)

    async def test_a_string_is_run_by_the_shell(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec("x=1; echo $((x + 1)) | tr 2 3; echo $0 >&2")
        assert result.stdout == "3\n"
        assert result.stderr.strip().endswith("sh")

    @pytest.mark.parametrize("code", [0, 1, 2, 42, 125, 128, 200, 255])
    async def test_an_exit_code_is_a_result(self, sandbox: Sandbox, code: int) -> None:
        result = await sandbox.exec(f"exit {code}")
        assert (result.exit_code, result.signal) == (code, None)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
    async def test_an_end_by_signal_is_128_and_the_signal(
        self, sandbox: Sandbox, number: signal.Signals
    ) -> None:
        result = await sandbox.exec(f"kill -{int(number)} $$")
        assert (result.exit_code, result.signal) == (128 + number, number)

    async def test_a_missing_program_is_127(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["no-such-program"])
        assert (result.exit_code, result.signal, result.stdout) == (127, None, "")

    async def test_a_file_that_is_no_program_is_126(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/plain", "text", 0o644)
        assert (await sandbox.exec([f"{home}/plain"])).exit_code == 126

    async def test_streams_are_kept_apart_and_bytes_exact(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(r"printf 'a\0b\377\303'; printf 'c\0\n' >&2")
        assert result.stdout_bytes == b"a\0b\xff\xc3"
        assert result.stderr_bytes == b"c\0\n"
        assert result.stdout == "a\0b\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"

    async def test_a_megabyte_comes_home_whole(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(NUMBERS, max_output_bytes=4 << 20)
        assert result.stdout_bytes == NUMBERED
        assert (result.stdout_total, result.truncated) == (len(NUMBERED), False)

    async def test_output_beyond_the_cap_is_counted_not_kept(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(f"{NUMBERS}; echo end >&2", max_output_bytes=100)
        assert result.stdout_bytes == NUMBERED[:100]
        assert (result.stdout_total, result.truncated) == (len(NUMBERED), True)
        assert result.stderr == "end\n"

    async def test_standard_input_is_empty_unless_given(self, sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["cat"], timeout=20)).stdout == ""
        fed = await sandbox.exec(["cat"], stdin=BYTES, timeout=20)
        assert fed.stdout_bytes == BYTES

    async def test_large_input_is_fed_while_output_comes(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["cat"], stdin=NUMBERED, max_output_bytes=4 << 20, timeout=60)
        assert result.stdout_bytes == NUMBERED

    async def test_input_that_nobody_reads_hurts_nobody(self, sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["true"], stdin=NUMBERED, timeout=20)).exit_code == 0

    async def test_environment_is_added_to_the_sandboxs(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec('echo "$A-$B-${PATH:+path}"', env={"A": "ü =", "B": ""})
        assert result.stdout == "ü =--path\n"
        assert (await sandbox.exec('echo "${A-unset}"')).stdout == "unset\n"

    async def test_a_working_directory_is_entered(self, sandbox: Sandbox, home: str) -> None:
        assert (await sandbox.exec(["pwd"], cwd=home)).stdout == f"{home}\n"

    async def test_a_child_left_behind_does_not_hold_the_command(self, sandbox: Sandbox) -> None:
        began = time.monotonic()
        result = await sandbox.exec("sleep 30 & echo started", timeout=25)
        assert result.stdout == "started\n"
        assert time.monotonic() - began < 20

    async def test_a_command_that_closes_its_output_is_waited_for(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec("exec >&- 2>&-; sleep 0.5; exit 9")
        assert result.exit_code == 9

    async def test_a_timeout_ends_the_whole_tree_with_the_output_kept(
        self, sandbox: Sandbox, home: str
    ) -> None:
        tree = (
            f"trap '' TERM; echo begun; (while :; do date >> {home}/beat; sleep 0.1; done) & wait"
        )
        with pytest.raises(ExecTimeout) as caught:
            await sandbox.exec(tree, timeout=1)
        assert caught.value.result is not None
        assert caught.value.result.stdout == "begun\n"
        before = await sandbox.files.read(f"{home}/beat")
        await sandbox.exec("sleep 0.5")
        assert await sandbox.files.read(f"{home}/beat") == before

    async def test_output_is_heard_before_the_end(self, sandbox: Sandbox, home: str) -> None:
        async def answer(text: str) -> None:
            await sandbox.files.write(f"{home}/heard", text)

        waits = f"echo ready; while [ ! -e {home}/heard ]; do sleep 0.05; done; cat {home}/heard"
        result = await sandbox.exec(waits, on_stdout=_once(answer), timeout=30)
        assert result.stdout == "ready\nready\n"

    async def test_callbacks_hear_every_byte_in_order(self, sandbox: Sandbox) -> None:
        heard: list[str] = []
        await sandbox.exec(NUMBERS, on_stdout=heard.append)
        assert "".join(heard).encode() == NUMBERED

    async def test_a_repeated_exec_id_runs_nothing_twice(self, sandbox: Sandbox, home: str) -> None:
        run = f"echo x >> {home}/runs; wc -l < {home}/runs"
        exec_id = f"once-{os.urandom(4).hex()}"
        first = await sandbox.exec(run, exec_id=exec_id)
        second = await sandbox.exec(run, exec_id=exec_id)
        assert first.stdout.split() == second.stdout.split() == ["1"]

    async def test_two_callers_with_one_exec_id_share_one_run(
        self, sandbox: Sandbox, home: str
    ) -> None:
        """The later one takes over as the reader; the earlier one is told, if it is not over."""
        run, exec_id = f"echo x >> {home}/runs; sleep 1", f"shared-{os.urandom(4).hex()}"
        outcomes = await asyncio.gather(
            *(sandbox.exec(run, exec_id=exec_id) for _ in range(2)), return_exceptions=True
        )
        assert any(isinstance(o, ExecResult) and o.exit_code == 0 for o in outcomes)
        assert all(isinstance(o, ExecResult | Conflict) for o in outcomes)
        assert await sandbox.files.read_text(f"{home}/runs") == "x\n"

    async def test_fifty_commands_at_once(self, sandbox: Sandbox) -> None:
        results = await asyncio.gather(*(sandbox.exec(["echo", str(n)]) for n in range(50)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(50)]

    async def test_a_long_command_line_and_environment(self, sandbox: Sandbox) -> None:
        word, value = "w" * 100_000, "v" * 100_000
        result = await sandbox.exec(
            ["sh", "-c", "echo ${#1} ${#V}", "sh", word], env={"V": value}
        )  # fmt: skip
        assert result.stdout == "100000 100000\n"

    async def test_an_unknown_user_is_refused(self, sandbox: Sandbox) -> None:
        with pytest.raises(InvalidArgument, match="user"):
            await sandbox.exec(["true"], user="nobody-of-that-name")

    async def test_a_working_directory_that_is_not_there_is_an_error_not_a_run(
        self, sandbox: Sandbox, home: str
    ) -> None:
        with pytest.raises(DSecError):
            await sandbox.exec(["true"], cwd=f"{home}/nothing")


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


class FileCases(Cases):
    """files.*."""

    @pytest.mark.parametrize(
        "data", [b"", b"\0", BYTES, b"a\r\nb\n", BYTES * (FILE_CHUNK_BYTES // 256),
                 BYTES * (FILE_CHUNK_BYTES // 100)],
        ids=["empty", "nul", "bytes", "newlines", "one-chunk", "chunks"],
    )  # fmt: skip
    async def test_what_is_written_is_read(self, sandbox: Sandbox, home: str, data: bytes) -> None:
        await sandbox.files.write(f"{home}/f", data)
        assert await sandbox.files.read(f"{home}/f") == data
        assert int((await sandbox.exec(f"wc -c < {home}/f")).stdout) == len(data)

    async def test_text_is_utf8(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/t", "héllo\r\n")
        assert await sandbox.files.read_text(f"{home}/t") == "héllo\r\n"

    async def test_missing_directories_are_made(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/a/b/c", b"x")
        assert (await sandbox.files.stat(f"{home}/a/b")).kind == "dir"

    async def test_a_mode_is_set_and_kept(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/s", "#!/bin/sh\necho ran\n", 0o755)
        assert (await sandbox.exec([f"{home}/s"])).stdout == "ran\n"
        await sandbox.files.write(f"{home}/s", "#!/bin/sh\necho again\n")
        assert (await sandbox.exec([f"{home}/s"])).stdout == "again\n"

    async def test_a_file_is_replaced_whole_or_not_at_all(
        self, sandbox: Sandbox, home: str
    ) -> None:
        """A reader that began before the write sees the old content to its end."""
        old, new = b"o" * 1_000_000, b"n" * 1_000_000
        await sandbox.files.write(f"{home}/f", old)
        reader = await sandbox.start(
            f"exec 3<{home}/f; echo open; read go; cat <&3 | tr -d o | wc -c"
        )
        async for event in reader:
            if isinstance(event, Output) and event.data == b"open\n":
                await sandbox.files.write(f"{home}/f", new)
                await reader.write("go\n")
                await reader.close_stdin()
            if isinstance(event, Exited):
                assert event.result.stdout.split() == ["open", "0"]
        assert await sandbox.files.read(f"{home}/f") == new

    async def test_errors_name_their_kind(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/file", b"x")
        with pytest.raises(FileNotFound):
            await sandbox.files.read(f"{home}/nothing")
        with pytest.raises(IsADirectory):
            await sandbox.files.read(home)
        with pytest.raises(IsADirectory):
            await sandbox.files.write(home, b"x")
        with pytest.raises(NotADirectory):
            await sandbox.files.read(f"{home}/file/below")
        with pytest.raises(NotADirectory):
            await sandbox.files.list(f"{home}/file")
        with pytest.raises(FileNotFound):
            await sandbox.files.remove(f"{home}/nothing")

    async def test_a_listing_tells_what_is_there(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.exec(f"cd {home} && printf 12345 > f && mkdir d && ln -s f l && chmod 640 f")
        found = {Path(e.path).name: e for e in await sandbox.files.list(home)}
        assert {name: e.kind for name, e in found.items()} == {"f": "file", "d": "dir", "l": "link"}
        assert (found["f"].size_bytes, found["f"].mode & 0o777) == (5, 0o640)
        assert found["l"].target == "f"

    async def test_stat_and_exists_do_not_follow_links(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.exec(["ln", "-s", "nowhere", f"{home}/l"])
        assert (await sandbox.files.stat(f"{home}/l")).kind == "link"
        assert await sandbox.files.exists(f"{home}/l")
        assert not await sandbox.files.exists(f"{home}/nowhere")

    async def test_a_link_out_of_the_tree_leads_to_the_sandboxs_own_root(
        self, sandbox: Sandbox, home: str
    ) -> None:
        await sandbox.files.write(f"{home}/inside", b"mine")
        up = "../" * 40
        await sandbox.exec(["ln", "-s", f"{up}{home.lstrip('/')}/inside", f"{home}/l"])
        assert await sandbox.files.read(f"{home}/l") == b"mine"

    async def test_rename_replaces(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/a", b"a")
        await sandbox.files.write(f"{home}/b", b"b")
        await sandbox.files.rename(f"{home}/a", f"{home}/b")
        assert await sandbox.files.read(f"{home}/b") == b"a"
        assert not await sandbox.files.exists(f"{home}/a")

    async def test_remove_takes_a_tree_only_when_told(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/d/e/f", b"x")
        with pytest.raises(DSecError):
            await sandbox.files.remove(f"{home}/d")
        assert await sandbox.files.exists(f"{home}/d/e/f")
        await sandbox.files.remove(f"{home}/d", recursive=True)
        assert not await sandbox.files.exists(f"{home}/d")

    async def test_removing_a_link_leaves_what_it_points_to(
        self, sandbox: Sandbox, home: str
    ) -> None:
        await sandbox.files.write(f"{home}/d/f", b"x")
        await sandbox.exec(["ln", "-s", "d", f"{home}/l"])
        await sandbox.files.remove(f"{home}/l", recursive=True)
        assert await sandbox.files.read(f"{home}/d/f") == b"x"

    async def test_a_directory_is_made_once_or_again(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.make_dir(f"{home}/x/y", 0o750)
        await sandbox.files.make_dir(f"{home}/x/y", 0o750)
        assert (await sandbox.files.stat(f"{home}/x/y")).mode & 0o777 == 0o750
        with pytest.raises((Conflict, DSecError)):
            await sandbox.files.make_dir(f"{home}/x/y", parents=False)

    async def test_a_tree_goes_up_and_comes_down_as_it_was(
        self, sandbox: Sandbox, home: str, tmp_path: Path
    ) -> None:
        source = tmp_path / "source"
        (source / "d/empty").mkdir(parents=True)
        (source / "d/run").write_text("#!/bin/sh\n")
        (source / "d/run").chmod(0o755)
        (source / "large").write_bytes(BYTES * (FILE_CHUNK_BYTES // 100))
        (source / "link").symlink_to("d/run")
        (source / "dangling").symlink_to("/no/where")
        await sandbox.files.upload(source, f"{home}/copy")
        await sandbox.files.download(f"{home}/copy", tmp_path / "back")
        assert _tree(tmp_path / "back") == _tree(source)
        await sandbox.files.upload(source, f"{home}/copy")  # over itself, links included


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


def _once(callback):  # type: ignore[no-untyped-def]
    """Only the first piece of output is answered."""
    heard = False

    async def first(text: str) -> None:
        nonlocal heard
        if not heard:
            heard = True
            await callback(text)

    return first


def _tree(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        content = path.read_bytes() if stat.S_ISREG(mode) else None
        target = os.readlink(path) if stat.S_ISLNK(mode) else None
        kept = None if target else stat.S_IMODE(mode)
        found[str(path.relative_to(root))] = (stat.S_IFMT(mode), kept, content, target)
    return found
