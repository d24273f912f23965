"""Commands on the edge: what they mean, how their output travels, what their end is called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest

from libdsec.bus import Call
from libdsec.errors import InvalidArgument, Unsupported
from libdsec.wire import defaults as d
from libdsec.wire.envelope import H_OFFSET, H_STREAM
from libdsec.wire.execution import KIND_OUTPUT, ExecRequest
from libdsec.wire.layer import ImageConfig
from libdsec.wire.model import Message
from libdsec.wire.sandbox import SandboxSpec
from services.edge.agent import AgentResult, ExitReason, OutputChunk, OutputStream, Stage
from services.edge.agent.protocol import ExitFlag
from services.edge.command import COMMANDS_KEPT, CommandLog, Window
from services.edge.exec_result import exec_done
from services.edge.exec_spec import exec_spec
from services.edge.record import Origin, Status
from services.edge.relay import Relay

OUT, ERR = OutputStream.STDOUT, OutputStream.STDERR


def origin(**spec: Any) -> Origin:
    image = ImageConfig(env={"A": "image", "I": "1"}, user="builder", workdir="/image")
    return Origin(
        sandbox_id="n1_aaaaaa_bbbbbbbbbbbb", project="p", request_id="r", index=0,
        spec=SandboxSpec(image="base@1", **spec), image=image, digests=(), created_at=0,
    )  # fmt: skip


def request(**fields: Any) -> ExecRequest:
    return ExecRequest(sandbox_id="n1_aaaaaa_bbbbbbbbbbbb", exec_id="e1", **fields)


def test_later_environments_win() -> None:
    status = Status(policy_env={"A": "policy", "P": "1"})
    of = origin(env={"A": "spec", "S": "1"}, secrets={"A": "secret", "T": "1"})
    spec = exec_spec(of, status, request(argv=("true",)))
    assert spec.env["A"] == "secret"
    assert {"I", "P", "S", "T", "PATH"} <= set(spec.env)
    own = exec_spec(of, status, request(argv=("true",), env={"A": "own"}))
    assert own.env["A"] == "own"
    bare = exec_spec(origin(), status, request(argv=("true",)))
    assert bare.env["A"] == "policy"


def test_user_and_directory_are_the_commands_the_sandboxs_the_images_or_roots() -> None:
    spec = exec_spec(origin(), Status(), request(argv=("x",)))
    assert (spec.user, spec.cwd) == ("builder", "/image")
    spec = exec_spec(origin(user="s", workdir="/s"), Status(), request(argv=("x",)))
    assert (spec.user, spec.cwd) == ("s", "/s")
    spec = exec_spec(origin(user="s"), Status(), request(argv=("x",), user="c", cwd="/c"))
    assert (spec.user, spec.cwd) == ("c", "/c")


def test_a_shell_command_is_run_by_sh() -> None:
    assert exec_spec(origin(), Status(), request(shell="a && b")).argv == (
        "/bin/sh",
        "-c",
        "a && b",
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"argv": ("a",), "shell": "a"},
        {"argv": ("a\0b",)},
        {"argv": ("a",), "env": {"X": "\0"}},
        {"argv": ("a",), "env": {"X=Y": "1"}},
        {"argv": ("a",), "timeout_s": 0},
        {"argv": ("a",), "max_output_bytes": d.MAX_OUTPUT_LIMIT + 1},
    ],
)
def test_a_command_that_can_never_run_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        exec_spec(origin(), Status(), request(**fields))


def test_a_terminal_is_unsupported_not_ignored() -> None:
    with pytest.raises(Unsupported):
        exec_spec(origin(), Status(), request(argv=("a",), tty=True))


def test_the_digest_tells_commands_apart_but_not_their_retries() -> None:
    def digest(policy_env: dict[str, str] | None = None, **fields: Any) -> int:
        status = Status(policy_env=policy_env or {})
        return exec_spec(origin(), status, request(**{"argv": ("a",), **fields})).digest

    base = digest()
    assert base == digest(timeout_s=5, max_output_bytes=10, stream=True)
    assert base == digest({"P": "changed"})
    others = [digest(argv=("b",)), digest(env={"X": "1"}), digest(cwd="/"), digest(stdin=b"x")]
    assert len({base, *others}) == 5
    assert all(0 < value < 1 << 64 for value in (base, *others))


class Caller(Call):
    """Keeps what is sent to it."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, bytes, Mapping[str, str]]] = []

    async def send(
        self, kind: str, data: bytes | Message, headers: Mapping[str, str] | None = None
    ) -> None:
        assert isinstance(data, bytes)
        self.parts.append((kind, data, headers or {}))


async def chunks(*these: OutputChunk) -> AsyncIterator[OutputChunk]:
    for one in these:
        yield one


def relay(caller: Caller, *, stream: bool = False, window: int = 1 << 30) -> Relay:
    return Relay(cast("Call", caller), "e1", stream=stream, window=Window(window))


async def test_little_output_is_inline_and_nothing_is_sent() -> None:
    caller = Caller()
    one = relay(caller)
    await one.run(
        chunks(OutputChunk(OUT, 0, b"ab"), OutputChunk(ERR, 0, b"e"), OutputChunk(OUT, 2, b"c"))
    )
    assert one.inline
    assert (one.output(OUT), one.output(ERR)) == (b"abc", b"e")
    assert caller.parts == []
    assert not one.lacks(3, 1)


async def test_much_output_is_sent_whole_in_order_and_in_bounded_pieces() -> None:
    caller = Caller()
    one = relay(caller)
    big = bytes(range(256)) * 1200
    await one.run(
        chunks(OutputChunk(OUT, 0, b"first"), OutputChunk(OUT, 5, big), OutputChunk(ERR, 0, b"x"))
    )
    assert not one.inline
    assert all(kind == KIND_OUTPUT for kind, _, _ in caller.parts)
    assert max(len(data) for _, data, _ in caller.parts) <= d.CHUNK_BYTES
    out = [(int(h[H_OFFSET]), data) for _, data, h in caller.parts if h[H_STREAM] == "1"]
    assert b"".join(data for _, data in out) == b"first" + big
    ends = 0
    for offset, data in out:
        assert offset == ends
        ends += len(data)


async def test_a_gap_in_the_ring_is_told_as_truncated() -> None:
    one = relay(Caller())
    await one.run(chunks(OutputChunk(OUT, 0, b"ab"), OutputChunk(OUT, 10, b"z")))
    assert one.lacks(11, 0)
    assert one.output(OUT) == b"abz"


async def test_output_that_was_captured_only_in_part_is_truncated() -> None:
    one = relay(Caller())
    await one.run(chunks(OutputChunk(OUT, 0, b"ab")))
    assert one.lacks(100, 0)


async def test_an_attached_reader_gets_its_limit_from_its_offset() -> None:
    one = relay(Caller())
    one.begin(100, 0, limit_bytes=4)
    await one.run(chunks(OutputChunk(OUT, 100, b"abc"), OutputChunk(OUT, 103, b"def")))
    assert one.output(OUT) == b"abcd"
    assert one.lacks(106, 0)


async def test_the_relay_stops_reading_while_the_reader_grants_no_credit() -> None:
    caller, taken = Caller(), 0
    window = Window(100)
    one = Relay(cast("Call", caller), "e1", stream=True, window=window)

    async def endless() -> AsyncIterator[OutputChunk]:
        nonlocal taken
        while taken < 10:
            taken += 1
            yield OutputChunk(OUT, (taken - 1) * 40, b"x" * 40)

    running = asyncio.create_task(one.run(endless()))
    await asyncio.sleep(0.01)
    assert (len(caller.parts), taken) == (2, 3)
    window.consumed(80)
    await asyncio.sleep(0.01)
    assert len(caller.parts) == 4
    window.consumed(10_000)  # more than was ever sent: counts for what was
    await asyncio.sleep(0.01)
    assert len(caller.parts) == 6
    running.cancel()


def result(**fields: Any) -> AgentResult:
    base: dict[str, Any] = {
        "exec_id": "e1", "exit_code": 0, "signal": None, "stdout": b"", "stderr": b"",
        "stdout_total": 0, "stderr_total": 0, "stdout_dropped": 0, "stderr_dropped": 0,
        "started_ns": 0, "ended_ns": 10**9, "reason": ExitReason.EXITED, "stage": Stage.NONE,
        "errno": 0, "flags": ExitFlag(0),
    }  # fmt: skip
    return AgentResult(**{**base, **fields})


def done(of: AgentResult) -> Any:
    return exec_done(
        of, relay(Caller()), what="command e", program="ruff", recorded=False, oom_killed=False
    )


def test_a_missing_program_is_a_result_with_its_reason_on_stderr() -> None:
    end = done(result(exit_code=127, reason=ExitReason.NOT_STARTED, stage=Stage.EXEC, errno=2))
    assert end.exit_code == 127
    assert end.stderr == b"ruff: No such file or directory\n"
    assert end.stderr_total == len(end.stderr)


def test_an_unknown_user_is_an_error_not_a_result() -> None:
    with pytest.raises(InvalidArgument, match="user"):
        done(result(exit_code=126, reason=ExitReason.NOT_STARTED, stage=Stage.USER, errno=2))


def test_a_timeout_is_in_the_result() -> None:
    killed = {"exit_code": 137, "signal": 9, "reason": ExitReason.SIGNALLED}
    end = done(result(**killed, flags=ExitFlag.TIMED_OUT))
    assert end.timed_out
    assert (end.exit_code, end.signal, end.duration_s) == (137, 9, 1.0)


def test_the_log_of_commands_is_bounded_and_forgets_the_oldest() -> None:
    log = CommandLog()
    for number in range(COMMANDS_KEPT + 1):
        log.note(str(number))
    assert log.get("0") is None
    assert log.get("1") is not None
    assert log.note("1", ("x",)) is log.get("1")
