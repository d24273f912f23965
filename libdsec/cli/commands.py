"""exec, shell, cp."""

from __future__ import annotations

import asyncio
import base64
import sys
from typing import Annotated, BinaryIO

import typer

from ..client import DSecClient
from ..command import Cmd
from ..errors import ExecTimeout, InvalidArgument
from ..exec_result import ExecResult
from ..execution import Output
from ..process import Exited
from ..sandbox import Sandbox
from ..transfer import Transferred
from ..wire import defaults as d
from ..wire.ids import SANDBOX
from . import output
from .output import Json
from .session import Exit, pairs, run, usage

_MAX_STDIN = 256 << 20

SandboxId = Annotated[str, typer.Argument(metavar="SANDBOX")]


def register(app: typer.Typer) -> None:
    app.command("exec", context_settings={"ignore_unknown_options": True})(exec_)
    app.command()(shell)
    app.command()(cp)


def exec_(
    ctx: typer.Context,
    sandbox: SandboxId,
    command: Annotated[list[str] | None, typer.Argument(metavar="[--] COMMAND...")] = None,
    script: Annotated[str | None, typer.Option("-c", help="Run by /bin/sh instead.")] = None,
    cwd: str | None = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE; repeatable.")
    ] = None,
    user: str | None = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Send standard input.")] = False,
    timeout: float = d.EXEC_TIMEOUT_S,
    exec_id: Annotated[str | None, typer.Option(help="Makes a repeat attach, not run.")] = None,
    as_json: Json = False,
) -> None:
    """Run a command; its output is this command's, as it comes.

    Exits with 1 when the command failed, whatever its own code, which is then told.
    """
    if (command is None) == (script is None):
        usage("say a COMMAND, or a script with -c, one of the two")
    cmd: Cmd = script if script is not None else command or []
    variables = pairs("--env", env)

    async def body(client: DSecClient) -> Exit:
        there = await client.connect(sandbox)
        data = await asyncio.to_thread(_stdin) if stdin else b""
        if as_json:
            try:
                result = await there.exec(
                    cmd, cwd=cwd, env=variables, user=user, stdin=data, timeout=timeout,
                    exec_id=exec_id,
                )  # fmt: skip
            except ExecTimeout as err:
                if err.result is not None:
                    output.document(_result(err.result, timed_out=True))
                raise
            output.document(_result(result))
            return Exit.FAILED if result.exit_code else Exit.DONE
        return await _streamed(there, cmd, cwd, variables, user, data, timeout, exec_id)

    run(ctx, body, as_json=as_json)


def shell(ctx: typer.Context, sandbox: SandboxId, user: str | None = None) -> None:
    """Run line after line of standard input, each as a command of its own."""
    prompt = f"{sandbox}$ " if sys.stdin.isatty() else ""

    async def body(client: DSecClient) -> None:
        there = await client.connect(sandbox)
        output.say(
            "dsec: each line is a command of its own: neither directory nor variables carry over"
            " (persistent sessions are not built yet)"
        )
        while (line := await asyncio.to_thread(_line, prompt)) is not None:
            if line.strip() == "exit":
                return
            if line.strip():
                await _streamed(there, line, None, {}, user, b"", d.EXEC_TIMEOUT_S, None)

    run(ctx, body, as_json=False)


def cp(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="PATH or SANDBOX:PATH.")],
    target: Annotated[str, typer.Argument(help="PATH or SANDBOX:PATH.")],
    user: str | None = None,
    as_json: Json = False,
) -> None:
    """Copy a file, or a directory's contents, into or out of a sandbox."""
    outward, inward = _remote(source), _remote(target)
    if (outward is None) == (inward is None):
        usage("one of the two is SANDBOX:PATH, the other a local path")

    async def body(client: DSecClient) -> None:
        with output.waiting("copying", quiet=as_json or not sys.stderr.isatty()) as tell:

            def told(done: Transferred) -> None:
                tell(f"{done.files} files, {output.size(done.size_bytes)}")

            if outward is not None:
                there = await client.connect(outward[0])
                done = await there.files.download(
                    outward[1], target, user=user, on_progress=told
                )  # fmt: skip
            elif inward is not None:
                there = await client.connect(inward[0])
                done = await there.files.upload(source, inward[1], user=user, on_progress=told)
        if as_json:
            output.document(vars(done))

    run(ctx, body, as_json=as_json)


async def _streamed(
    sandbox: Sandbox,
    cmd: Cmd,
    cwd: str | None,
    env: dict[str, str],
    user: str | None,
    stdin: bytes,
    timeout: float,
    exec_id: str | None,
) -> Exit:
    """Run it with its bytes passed through untouched; an interrupt ends it with its tree."""
    process = await sandbox.start(
        cmd, cwd=cwd, env=env, user=user, stdin=stdin, timeout=timeout, exec_id=exec_id
    )
    try:
        async for event in process:
            if isinstance(event, Output):
                _write(sys.stdout.buffer if event.stream == "stdout" else sys.stderr.buffer, event)
            else:
                return _ended(event, timeout)
    except (asyncio.CancelledError, BrokenPipeError):  # nobody is there for what it still says
        await process.kill()
        raise
    raise AssertionError("a process's last event is its end")


def _write(stream: BinaryIO, piece: Output) -> None:
    stream.write(piece.data)
    stream.flush()


def _ended(event: Exited, timeout: float) -> Exit:
    result = event.result
    if event.timed_out:
        output.say(f"dsec: ended by its timeout of {timeout:g} s, with everything it started")
        return Exit.FAILED
    if result.exit_code == 0:
        return Exit.DONE
    how = f"by signal {result.signal}" if result.signal else f"with {result.exit_code}"
    how += ", out of memory" if result.oom_killed else ""
    output.say(f"dsec: the command ended {how}")
    return Exit.FAILED


def _result(result: ExecResult, *, timed_out: bool = False) -> dict[str, object]:
    """Text where it is text; bytes that are not UTF-8 come in base64 beside it."""
    found: dict[str, object] = {
        "exit_code": result.exit_code, "signal": result.signal, "stdout": result.stdout,
        "stderr": result.stderr, "stdout_total": result.stdout_total,
        "stderr_total": result.stderr_total, "truncated": result.truncated,
        "duration_s": result.duration_s, "timed_out": timed_out, "oom_killed": result.oom_killed,
        "request_id": result.request_id,
    }  # fmt: skip
    for name, raw in (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes)):
        if found[name].__str__().encode() != raw:
            found[f"{name}_base64"] = base64.b64encode(raw).decode()
    return found


def _stdin() -> bytes:
    data = sys.stdin.buffer.read(_MAX_STDIN + 1)
    if len(data) > _MAX_STDIN:
        raise InvalidArgument(
            f"standard input has more than {_MAX_STDIN} bytes", hint="copy a file in with dsec cp"
        )
    return data


def _line(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        return None


def _remote(text: str) -> tuple[str, str] | None:
    """The two halves of SANDBOX:PATH, or None for a local path."""
    head, separator, path = text.partition(":")
    return (head, path or ".") if separator and SANDBOX.fullmatch(head) else None
