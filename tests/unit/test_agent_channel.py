"""The channel against an agent that misbehaves, which the real one does not do on request."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from services.edge.agent import (
    AgentChannel,
    AgentGoneError,
    AgentProtocolError,
    AgentRefusedError,
    ErrorCode,
    ExecSpec,
)
from services.edge.agent.protocol import FrameType

HELLO = struct.pack(
    "<HH16sQ9I", 1, 0, b"b" * 16, 5, 1, 2**21, 8, 8, 65536, 2**20, 2**26, 2**23, 900
)
HELLO += struct.pack("<I", 0)
Agent = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def frame(kind: FrameType, stream: int, payload: bytes) -> bytes:
    return struct.pack("<IBI", len(payload), kind, stream) + payload


async def request(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    length, kind, stream = struct.unpack("<IBI", await reader.readexactly(9))
    return kind, stream, await reader.readexactly(length)


@contextlib.asynccontextmanager
async def scripted(where: Path, agent: Agent, hello: bytes | None = HELLO) -> AsyncIterator[Path]:
    """A server that says hello and then does what `agent` says."""
    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        if hello is not None:
            writer.write(frame(FrameType.HELLO, 0, hello))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await agent(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_unix_server(serve, where / "s"):
        yield where / "s"
    async with asyncio.timeout(5):
        await asyncio.gather(*filter(None, served))


async def until_closed(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()


SPEC = ExecSpec(exec_id="e", argv=("true",))


async def test_connect_refuses_another_major_version(tmp_path: Path) -> None:
    async with scripted(tmp_path, until_closed, struct.pack("<H", 2) + HELLO[2:]) as path:
        with pytest.raises(AgentProtocolError, match="version 2"):
            await AgentChannel.connect(path)


async def test_connect_gives_up_on_a_silent_agent(tmp_path: Path) -> None:
    async with scripted(tmp_path, until_closed, hello=None) as path:
        with pytest.raises(AgentGoneError, match="no hello"):
            await AgentChannel.connect(path, timeout_s=0.05)


async def test_connect_to_nothing_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(AgentGoneError, match="absent"):
        await AgentChannel.connect(tmp_path / "absent")


async def test_a_connection_lost_in_the_middle_is_agent_gone(tmp_path: Path) -> None:
    async def agent(reader, writer) -> None:
        await request(reader)

    async with scripted(tmp_path, agent) as path:
        channel = await AgentChannel.connect(path)
        with pytest.raises(AgentGoneError):
            await channel.exec(SPEC)
        with pytest.raises(AgentGoneError):
            await channel.ping()


@pytest.mark.parametrize(
    "answer",
    [
        frame(FrameType.PONG, 1, b""),
        frame(FrameType.EXIT, 1, b"short"),
        frame(FrameType.EXIT, 1, bytes(71)),  # before STARTED
        frame(FrameType.OUTPUT, 1, struct.pack("<BQ", 3, 0)),
        frame(FrameType.DONE, 0, bytes(4)),
        struct.pack("<IBI", 2**31, FrameType.OUTPUT, 1),
    ],
    ids=["wrong type", "short", "out of order", "no such stream", "stream 0", "too long"],
)
async def test_garbage_from_the_agent_ends_the_connection(tmp_path: Path, answer: bytes) -> None:
    async def agent(reader, writer) -> None:
        await request(reader)
        writer.write(answer)
        await reader.read()

    async with scripted(tmp_path, agent) as path:
        channel = await AgentChannel.connect(path)
        with pytest.raises(AgentGoneError):
            await channel.exec(SPEC)
        assert isinstance(await channel.wait_closed(), AgentProtocolError)


async def test_a_refusal_carries_its_code(tmp_path: Path) -> None:
    async def agent(reader, writer) -> None:
        _, stream, _ = await request(reader)
        writer.write(frame(FrameType.ERROR, stream, struct.pack("<HII", 5, 11, 2) + b"no\0"))
        await reader.read()

    async with scripted(tmp_path, agent) as path:
        channel = await AgentChannel.connect(path)
        with pytest.raises(AgentRefusedError, match="no") as caught:
            await channel.exec(SPEC)
        assert (caught.value.code, caught.value.errno) == (ErrorCode.LIMIT, 11)
        await channel.aclose()


async def test_cancelling_an_exec_detaches_and_ignores_late_frames(tmp_path: Path) -> None:
    seen: list[int] = []

    async def agent(reader, writer) -> None:
        _, stream, _ = await request(reader)
        kind, _, _ = await request(reader)
        seen.append(kind)
        writer.write(frame(FrameType.OUTPUT, stream, struct.pack("<BQ", 1, 0) + b"late"))
        kind, ping, payload = await request(reader)
        writer.write(frame(FrameType.PONG, ping, payload))
        await reader.read()

    async with scripted(tmp_path, agent) as path:
        channel = await AgentChannel.connect(path)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await channel.exec(SPEC)
        assert await channel.ping() < 5
        assert seen == [FrameType.DETACH]
        await channel.aclose()
