"""The supervisor's socket: one JSON line in, JSON lines out, the last of them `{"done": true}`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

Say = Callable[[dict[str, object]], None]
Command = Callable[[dict[str, object], Say], Awaitable[None]]

_ANSWER_TIMEOUT_S = 300.0


async def serve_control(path: Path, command: Command) -> asyncio.Server:
    """Answer on `path`; a command's exception becomes an `error` line."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(line: dict[str, object]) -> None:
            writer.write(json.dumps(line).encode() + b"\n")

        try:
            request = json.loads(await asyncio.wait_for(reader.readline(), 5))
            await command(request, say)
            say({"done": True})
        except Exception as err:  # whatever went wrong belongs to the person who asked
            say({"error": f"{type(err).__name__}: {err}", "done": True})
        with contextlib.suppress(OSError):
            await writer.drain()
            writer.close()

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(answer, str(path))
    path.chmod(0o600)
    return server


async def ask_control(path: Path, request: dict[str, object]) -> AsyncIterator[dict[str, object]]:
    """Send one command and yield the lines of its answer.

    Raises:
        ConnectionError: no supervisor answers there, or it went away in the middle.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except FileNotFoundError as err:
        raise ConnectionRefusedError(str(path)) from err
    try:
        writer.write(json.dumps(request).encode() + b"\n")
        while True:
            line = await asyncio.wait_for(reader.readline(), _ANSWER_TIMEOUT_S)
            if not line:
                raise ConnectionResetError(f"the supervisor at {path} went away")
            answer = json.loads(line)
            yield answer
            if answer.get("done"):
                return
    finally:
        writer.close()
