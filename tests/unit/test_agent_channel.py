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


WINDOW = 65_536  # of HELLO
READS = ExecSpec(exec_id="e", argv=("cat",), stdin_pipe=True)


def started(stream: int, received: int, limit: int) -> bytes:
    return frame(FrameType.STARTED, stream, struct.pack("<IBQQQ", 7, 0, 0, received, limit))


async def filled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Start what is asked for and take one window of its input; its stream."""
    kind, stream, _ = await request(reader)
    assert kind == FrameType.EXEC
    writer.write(started(stream, 0, WINDOW))
    received = 0
    while received < WINDOW:
        kind, _, payload = await request(reader)
        assert kind == FrameType.STDIN
        received += len(payload) - 8
    return stream


async def test_who_takes_over_goes_on_with_the_input(tmp_path: Path) -> None:
    """A reader that attaches while somebody still writes must not lose what is written."""
    rest: list[tuple[int, int, bytes]] = []

    async def agent(reader, writer) -> None:
        first = await filled(reader, writer)
        kind, second, _ = await request(reader)
        assert kind == FrameType.ATTACH
        writer.write(frame(FrameType.ERROR, first, struct.pack("<HII", 2, 0, 0) + b"\0"))
        await asyncio.sleep(0.02)  # the error is read long before the answer
        writer.write(started(second, WINDOW, 2 * WINDOW))
        while not rest or rest[-1][0] != FrameType.CLOSE_STDIN:
            rest.append(await request(reader))
        await reader.read()

    async with scripted(tmp_path, agent) as path:
        channel = await AgentChannel.connect(path)
        process = await channel.start(READS)
        writing = asyncio.create_task(process.write(b"x" * WINDOW + b"rest"))
        await asyncio.sleep(0.02)
        reading = await channel.attach("e")
        assert reading.stdin_received == WINDOW + 4  # a third writer goes on behind these
        await asyncio.wait_for(writing, 5)
        await channel.close_stdin("e")
        async with asyncio.timeout(5):
            while len(rest) < 2:
                await asyncio.sleep(0.01)
        assert rest[0][2] == struct.pack("<Q", WINDOW) + b"rest"
        await channel.aclose()


async def test_input_that_was_not_sent_is_reported(tmp_path: Path) -> None:
    async def agent(reader, writer) -> None:
        await filled(reader, writer)
        await reader.read()

    async with scripted(tmp_path, agent) as path:
        channel = await AgentChannel.connect(path)
        process = await channel.start(READS)
        writing = asyncio.create_task(process.write(b"x" * WINDOW + b"rest"))
        await asyncio.sleep(0.02)
        process.detach()
        with pytest.raises(AgentGoneError, match="input"):
            await asyncio.wait_for(writing, 5)
        await channel.aclose()
