"""Running one command: its arguments checked, its input fed, its output handed to callbacks."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from .callback import Callback, notify
from .connection import Connection
from .errors import DSecError, InvalidArgument, Unsupported
from .exec_result import ExecResult
from .execution import Reading
from .operation import Operation
from .process import INPUT_S, ended
from .spec import check_environment, check_seconds
from .wire.defaults import CHUNK_BYTES, INLINE_BYTES, MAX_OUTPUT_LIMIT
from .wire.execution import ExecRequest, ProcessInput, ProcessSignal
from .wire.ids import sandbox_node
from .wire.model import random_token
from .wire.subjects import EXEC_INPUT, EXEC_SIGNAL

Cmd = str | Sequence[str]

_EXEC_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SIGKILL = 9


def command(
    sandbox_id: str,
    cmd: Cmd,
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | int | None,
    timeout: float | None,
    max_output_bytes: int,
    exec_id: str | None,
    tty: bool = False,
    stream: bool = False,
    detach: bool = False,
) -> ExecRequest:
    """The request for a command, still without input.

    Raises:
        InvalidArgument: naming what is wrong.
        Unsupported: a terminal is asked for.
    """
    if tty:
        raise Unsupported("tty=True is not built yet", hint="run it without a terminal")
    if not 0 <= max_output_bytes <= MAX_OUTPUT_LIMIT:
        raise InvalidArgument(
            f"max_output_bytes={max_output_bytes} is impossible", hint=f"0 to {MAX_OUTPUT_LIMIT}"
        )
    if exec_id is not None and _EXEC_ID.fullmatch(exec_id) is None:
        raise InvalidArgument(
            f"exec_id {exec_id[:80]!r} is not valid", hint="1 to 64 letters, digits and _ -"
        )
    return ExecRequest(
        sandbox_id=sandbox_id,
        exec_id=exec_id or random_token(),
        argv=() if isinstance(cmd, str) else _argv(cmd),
        shell=_text("the command", cmd) if isinstance(cmd, str) else None,
        cwd=None if cwd is None else _text("cwd", cwd),
        env=check_environment(env or {}),
        user=None if user is None else _text("user", str(user)),
        timeout_s=None if timeout is None else check_seconds("timeout", timeout),
        max_output_bytes=max_output_bytes,
        stream=stream,
        detach=detach,
    )


def with_input(request: ExecRequest, stdin: bytes | str | None) -> tuple[ExecRequest, bytes]:
    """The request with its input, or, when that is large, with what is to be fed to it."""
    raw = stdin.encode() if isinstance(stdin, str) else stdin or b""
    if len(raw) <= INLINE_BYTES:
        return request.model_copy(update={"stdin": raw}), b""
    return request.model_copy(update={"stdin_open": True}), raw


async def run(
    connection: Connection,
    op: Operation,
    request: ExecRequest,
    fed: bytes,
    on_stdout: Callback[str] | None,
    on_stderr: Callback[str] | None,
) -> ExecResult:
    """Run to the end.

    Raises:
        ExecTimeout: with the partial result.
        DSecError: see `Reading.outputs`.
    """
    reading = Reading(
        connection, op, request.sandbox_id, request.exec_id,
        capture_bytes=request.max_output_bytes, stream=request.stream,
    )  # fmt: skip
    text = {"stdout": _Text(on_stdout), "stderr": _Text(on_stderr)}
    async with _fed(connection, op, reading, request, fed):
        async for output in reading.outputs(request):
            await text[output.stream].take(output.data)
        for stream in text.values():
            await stream.end()
    return ended(reading)


async def feed(connection: Connection, op: Operation, request: ExecRequest, data: bytes) -> None:
    """Write all of `data` to the command's input and close it; it may end before it has read it."""
    with suppress(DSecError):
        for first in range(0, len(data), CHUNK_BYTES):
            message = ProcessInput(
                sandbox_id=request.sandbox_id,
                exec_id=request.exec_id,
                offset=first,
                data=data[first : first + CHUNK_BYTES],
                close=first + CHUNK_BYTES >= len(data),
            )
            await connection.call(
                EXEC_INPUT, message, op=op, node=sandbox_node(request.sandbox_id),
                budget_s=INPUT_S, idempotent=True,
            )  # fmt: skip


async def kill_tree(connection: Connection, op: Operation, request: ExecRequest) -> None:
    """End a command that nobody waits for any more; best effort."""
    message = ProcessSignal(
        sandbox_id=request.sandbox_id, exec_id=request.exec_id, signal=_SIGKILL, tree=True
    )
    with suppress(DSecError):
        await connection.call(
            EXEC_SIGNAL, message, op=op, node=sandbox_node(request.sandbox_id), budget_s=5.0
        )


@asynccontextmanager
async def _fed(
    connection: Connection, op: Operation, reading: Reading, request: ExecRequest, data: bytes
) -> AsyncGenerator[None, None]:
    """Feed `data` beside whatever is done inside; most commands have none, and pay nothing."""
    if not data:
        yield
        return

    async def when_started() -> None:
        await reading.started
        await feed(connection, op, request, data)

    feeding = asyncio.create_task(when_started())
    try:
        yield
    finally:
        feeding.cancel()
        await asyncio.wait({feeding})


class _Text:
    """Turns one stream's bytes into text, characters that straddle two chunks included."""

    def __init__(self, callback: Callback[str] | None) -> None:
        self._callback = callback
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def take(self, data: bytes) -> None:
        if self._callback is not None and (text := self._decoder.decode(data)):
            await notify(self._callback, text)

    async def end(self) -> None:
        if self._callback is not None and (text := self._decoder.decode(b"", True)):
            await notify(self._callback, text)


def _argv(cmd: Sequence[str]) -> tuple[str, ...]:
    if not cmd:
        raise InvalidArgument("the command is empty", hint='["true"], or a string for /bin/sh')
    return tuple(_text("the command", word) for word in cmd)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidArgument(f"{what}: {str(value)[:80]!r} is not text without NUL")
    return value
