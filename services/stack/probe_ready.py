"""Asking a process whether it serves: an HTTP path that answers 200, or a PING on a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class HttpReady:
    port: int
    path: str


@dataclass(frozen=True)
class RedisReady:
    socket: Path


Ready = HttpReady | RedisReady


async def is_ready(check: Ready) -> bool:
    """False for refused, slow or wrong answers alike."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            match check:
                case HttpReady(port, path):
                    return b" 200 " in await _ask_http(port, path)
                case RedisReady(socket):
                    return (await _ask_redis(socket)).startswith(b"+PONG")
    except (OSError, TimeoutError):
        return False


async def why_not_ready(check: Ready) -> str:
    """What the process itself says about it, for a person; "" when it says nothing."""
    if not isinstance(check, HttpReady):
        return ""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", check.port)
            writer.write(f"GET {check.path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            answer = await reader.read(4096)
            writer.close()
            body = answer.partition(b"\r\n\r\n")[2].decode(errors="replace")
            return " ".join(body.split())  # one line, as in every message
    except (OSError, TimeoutError):
        return ""


async def _ask_http(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    return line


async def _ask_redis(socket: Path) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(socket))
    writer.write(b"PING\r\n")
    line = await reader.readline()
    writer.close()
    return line
