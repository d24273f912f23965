"""One connection to an agent: bytes in and out, frames handed to the stream they belong to.

Invariants: a stream is registered before its request is written and leaves with its last frame;
when the connection ends, for whatever reason, every registered stream is told exactly once and
nothing can be registered any more.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from . import codec
from .errors import AgentError, AgentGoneError, AgentProtocolError
from .model import Hello
from .protocol import VERSION_MAJOR, FrameType

_LAST_STREAM = 2**32 - 1


class Stream(Protocol):
    def on_frame(self, kind: int, payload: memoryview) -> bool:
        """Take one frame; True if it was the last one."""

    def on_gone(self, error: AgentError) -> None: ...


class AgentConnection(asyncio.Protocol):
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[Hello] = loop.create_future()
        self.closed: asyncio.Future[AgentError] = loop.create_future()
        self._decoder = codec.FrameDecoder()
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._transport: asyncio.Transport | None = None
        self._reason: AgentError | None = None

    def open_stream(self, stream: Stream) -> int:
        """Register and number it; raises ``AgentGoneError`` if the connection is down."""
        self._check()
        self._last_stream = self._last_stream % _LAST_STREAM + 1
        while self._last_stream in self._streams:
            self._last_stream = self._last_stream % _LAST_STREAM + 1
        self._streams[self._last_stream] = stream
        return self._last_stream

    def forget_stream(self, number: int) -> None:
        """Frames that still come for it are ignored."""
        self._streams.pop(number, None)

    def send(self, data: bytes) -> None:
        self._check()
        assert self._transport is not None
        self._transport.write(data)

    def close(self, reason: AgentError) -> None:
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    def _check(self) -> None:
        if self._reason is not None:
            raise AgentGoneError(str(self._reason)) from self._reason
        if self._transport is None:
            raise AgentGoneError("the connection is not made yet")

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._reason is not None:
            return
        try:
            for frame in self._decoder.feed(data):
                self._dispatch(frame)
        except AgentProtocolError as error:
            self.close(error)

    def _dispatch(self, frame: codec.Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is not None:
            if stream.on_frame(frame.type, frame.payload):
                self._streams.pop(frame.stream, None)
        elif frame.stream == 0:
            self._dispatch_own(frame)

    def _dispatch_own(self, frame: codec.Frame) -> None:
        if frame.type == FrameType.HELLO and not self.hello.done():
            major = codec.decode_u16(frame.payload)
            if major != VERSION_MAJOR:
                raise AgentProtocolError(f"agent speaks version {major}, not {VERSION_MAJOR}")
            self.hello.set_result(codec.decode_hello(frame.payload))
        elif frame.type == FrameType.ERROR:
            refusal = codec.decode_error(frame.payload)
            self.close(AgentGoneError(f"{refusal.code.name.lower()}: {refusal.message}"))
        else:
            raise AgentProtocolError(f"frame of type {frame.type:#x} for the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reason is None:
            self._reason = AgentGoneError(f"agent connection lost: {exc or 'closed by the agent'}")
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.on_gone(self._reason)
        if not self.hello.done():
            self.hello.set_exception(self._reason)
            self.hello.exception()  # retrieved: connect() may have given up already
        if not self.closed.done():
            self.closed.set_result(self._reason)
