"""What running a command must be like."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable

import pytest

from libdsec import Conflict, DSecError, ExecResult, ExecTimeout, InvalidArgument, Sandbox

from .case import BYTES, NUMBERED, NUMBERS, Cases


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


def _once(callback: Callable[[str], Awaitable[None]]) -> Callable[[str], Awaitable[None]]:
    """Only the first piece of output is answered."""
    heard = False

    async def first(text: str) -> None:
        nonlocal heard
        if not heard:
            heard = True
            await callback(text)

    return first
