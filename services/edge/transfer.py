"""Files that arrive in several chunks, until the last one is there.

Each is a nameless file on the node's own disk: an edge that dies leaves nothing behind, and the
caller begins again. Bounds: how many, how large together, and how long one may stand still; what a
bound drops is answered with an error by the next chunk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libdsec.errors import InvalidArgument, QuotaExceeded
from libdsec.wire.files import FileWrite

from .node import Node

TRANSFER_IDLE_S: Final = 120.0
TRANSFERS_LIMIT: Final = 256
TRANSFERS_BYTES: Final = 4 << 30
FILE_BYTES: Final = 1 << 30  # of one file: it is handed to the agent in one piece


@dataclass
class _Transfer:
    fd: int
    received: int
    touched_s: float


class Transfers:
    """take() chunk by chunk -> the whole, or None while more is to come; close() at the end."""

    def __init__(self, node: Node, directory: Path) -> None:
        self._node = node
        self._clock = node.clock
        self._directory = directory
        self._open: dict[tuple[str, str], _Transfer] = {}

    async def take(self, sandbox_id: str, chunk: FileWrite, *, limit_bytes: int) -> bytes | None:
        """A chunk that was seen before changes nothing, so it may be sent again.

        Raises:
            InvalidArgument: chunks are missing before this one, or the transfer is not known.
            QuotaExceeded: too many transfers, or too much in them.
        """
        key = (sandbox_id, chunk.transfer_id)
        self._drop_idle()
        transfer = self._open.get(key) or self._begin(key, chunk)
        if chunk.offset > transfer.received:
            raise InvalidArgument(
                f"chunk at {chunk.offset} of {chunk.path}, but {transfer.received} bytes are here",
                hint="send the chunks in order",
            )
        end = chunk.offset + len(chunk.data)
        if end > min(limit_bytes, FILE_BYTES):
            self._end(key)
            raise QuotaExceeded(
                f"{chunk.path} has more than {min(limit_bytes, FILE_BYTES)} bytes",
                hint="that is the sandbox's disk, or the most that one file may have",
            )
        os.pwrite(transfer.fd, chunk.data, chunk.offset)
        transfer.received = max(transfer.received, end)
        transfer.touched_s = self._clock.monotonic_s()
        if not chunk.last:
            return None
        del self._open[key]  # nobody adds to it any more
        try:
            return await self._node.run(os.pread, transfer.fd, transfer.received, 0)
        finally:
            os.close(transfer.fd)

    def close(self) -> None:
        for key in tuple(self._open):
            self._end(key)

    def _begin(self, key: tuple[str, str], chunk: FileWrite) -> _Transfer:
        if chunk.offset > 0:
            raise InvalidArgument(
                f"transfer {chunk.transfer_id} of {chunk.path} is not known",
                hint="it stood still for too long, or the edge restarted: begin again",
            )
        held = sum(transfer.received for transfer in self._open.values())
        if len(self._open) >= TRANSFERS_LIMIT or held >= TRANSFERS_BYTES:
            raise QuotaExceeded(
                f"{len(self._open)} transfers with {held} bytes are under way on this node",
                retry_after_s=5.0,
            )
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        fd = os.open(self._directory, flags, 0o600)
        transfer = self._open[key] = _Transfer(fd, 0, self._clock.monotonic_s())
        return transfer

    def _drop_idle(self) -> None:
        horizon = self._clock.monotonic_s() - TRANSFER_IDLE_S
        for key, transfer in tuple(self._open.items()):
            if transfer.touched_s < horizon:
                self._end(key)

    def _end(self, key: tuple[str, str]) -> None:
        os.close(self._open.pop(key).fd)
