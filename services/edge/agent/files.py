"""File operations inside one sandbox, as one of its users. ``OSError`` by errno when they fail."""

from __future__ import annotations

import os

from . import codec
from .connection import AgentConnection
from .errors import AgentStartError
from .model import AgentResult, FileData, FileEntry, Listing
from .protocol import MODE_KEEP, ExitReason, FileFlag, FileOp, Stage
from .stream import WINDOW, CollectingStream

DEFAULT_TIMEOUT_S = 120.0
DEFAULT_MAX_BYTES = 64 * 1024 * 1024
DEFAULT_MAX_ENTRIES = 100_000


class AgentFiles:
    """Paths are the sandbox's own, absolute or below ``/``; links never lead out of it."""

    def __init__(self, connection: AgentConnection, stdin_window: int) -> None:
        self._connection = connection
        self._stdin_window = stdin_window

    async def read(
        self,
        path: str,
        *,
        offset: int = 0,
        max_bytes: int = DEFAULT_MAX_BYTES,
        user: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> FileData:
        request = codec.FileRequest(
            op=FileOp.READ, path=path, offset=offset, size=max_bytes, user=user, timeout_s=timeout_s
        )
        result = await self._run(request)
        return FileData(result.stdout, result.value)

    async def write(
        self,
        path: str,
        data: bytes,
        *,
        mode: int | None = None,
        user: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Atomic: readers see the old content or the new. ``mode`` None keeps it (new: 0644)."""
        request = codec.FileRequest(
            op=FileOp.WRITE,
            path=path,
            size=len(data),
            mode=MODE_KEEP if mode is None else mode,
            user=user,
            timeout_s=timeout_s,
        )
        await self._run(request, data)

    async def list(
        self,
        path: str,
        *,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        user: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Listing:
        request = codec.FileRequest(
            op=FileOp.LIST, path=path, size=max_entries, user=user, timeout_s=timeout_s
        )
        result = await self._run(request)
        return Listing(codec.decode_entries(result.stdout), result.value)

    async def stat(
        self,
        path: str,
        *,
        follow: bool = False,
        user: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> FileEntry:
        flags = FileFlag.FOLLOW if follow else FileFlag(0)
        request = codec.FileRequest(
            op=FileOp.STAT, path=path, flags=flags, user=user, timeout_s=timeout_s
        )
        result = await self._run(request)
        return codec.decode_entries(result.stdout)[0]

    async def remove(
        self,
        path: str,
        *,
        recursive: bool = False,
        user: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """A link itself is removed, not its target; a directory must be empty unless recursive."""
        flags = FileFlag.RECURSIVE if recursive else FileFlag(0)
        await self._run(
            codec.FileRequest(
                op=FileOp.REMOVE, path=path, flags=flags, user=user, timeout_s=timeout_s
            )
        )

    async def rename(
        self, source: str, target: str, *, user: str = "", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        await self._run(
            codec.FileRequest(
                op=FileOp.RENAME, path=source, path2=target, user=user, timeout_s=timeout_s
            )
        )

    async def make_dir(
        self,
        path: str,
        *,
        parents: bool = True,
        mode: int | None = None,
        user: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """With parents, missing directories above are made and an existing one is fine."""
        request = codec.FileRequest(
            op=FileOp.MKDIR,
            path=path,
            flags=FileFlag.RECURSIVE if parents else FileFlag(0),
            mode=MODE_KEEP if mode is None else mode,
            user=user,
            timeout_s=timeout_s,
        )
        await self._run(request)

    async def _run(self, request: codec.FileRequest, data: bytes | None = None) -> AgentResult:
        writes = request.op == FileOp.WRITE
        stream = CollectingStream(
            self._connection, f"file {request.path}", self._stdin_window if writes else 0
        )
        try:
            self._connection.send(codec.encode_file(stream.number, request, WINDOW))
            if data:
                stream.stdin.push(data)
            await stream.ended
        finally:
            stream.detach()
        result = stream.collected()
        _raise_for(result, request.path)
        return result


def _raise_for(result: AgentResult, path: str) -> None:
    if result.timed_out:
        raise TimeoutError(f"{path}: the file operation did not end in time")
    if result.reason is ExitReason.NOT_STARTED and result.stage is Stage.FILE:
        raise OSError(result.errno, os.strerror(result.errno), path)
    if result.reason is ExitReason.NOT_STARTED:
        raise AgentStartError(result.stage, result.errno)
    if result.reason is ExitReason.SIGNALLED:
        raise InterruptedError(f"{path}: the file operation was killed by signal {result.signal}")
