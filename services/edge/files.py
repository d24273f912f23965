"""Files: the wire's requests as operations of the agent, which runs them inside as the user.

A file of several chunks is collected on the host, in a nameless file that vanishes with the edge,
and written in one piece: readers inside see the old content or the new. A transfer that stops is
dropped after TRANSFER_IDLE_S.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from libdsec.bus import Call
from libdsec.errors import InvalidArgument, Unsupported
from libdsec.wire import defaults as d
from libdsec.wire.files import (
    DirListing,
    FileChunk,
    FileMakeDir,
    FilePath,
    FileRead,
    FileRemove,
    FileRename,
    FileStat,
    FileSymlink,
    FileWrite,
    FileWritten,
)
from libdsec.wire.model import Empty, random_token

from .agent import AgentChannel, ExecSpec, FileEntry, FileKind
from .agent_errors import translated
from .exec_spec import environment, who
from .pause import Pauses
from .sandbox import Sandbox
from .table import Table
from .transfer import Transfers

LIST_LIMIT: Final = 2000  # entries of one answer
_KINDS: Final = {
    FileKind.FILE: "file",
    FileKind.DIRECTORY: "dir",
    FileKind.SYMLINK: "link",
    FileKind.OTHER: "other",
}


class Files:
    """One method per verb."""

    def __init__(self, table: Table, pauses: Pauses, transfers: Transfers) -> None:
        self._table = table
        self._pauses = pauses
        self._transfers = transfers

    async def read(self, request: FileRead, call: Call) -> FileChunk:
        size = min(request.max_bytes, d.FILE_CHUNK_BYTES)
        if request.offset < 0 or size < 0:
            raise InvalidArgument("offset and max_bytes are not negative")
        async with self._inside(request.sandbox_id, request.path, call) as (sandbox, channel):
            user = who(sandbox.origin, request.user)
            found = await channel.files.read(
                request.path, offset=request.offset, max_bytes=size, user=user
            )
            eof = request.offset + len(found.data) >= found.size
            version = ""
            if request.offset > 0 or not eof:  # a file of one chunk cannot change in between
                entry = await channel.files.stat(request.path, follow=True, user=user)
                version = f"{entry.mtime_ns}.{entry.size}"
            return FileChunk(data=found.data, size_bytes=found.size, eof=eof, version=version)

    async def write(self, request: FileWrite, call: Call) -> FileWritten:
        sandbox = self._table.find(call.project, request.sandbox_id)
        data: bytes | None = request.data
        if request.offset > 0 or not request.last:
            limit = sandbox.origin.spec.resources.disk_mib << 20
            data = await self._transfers.take(sandbox.id, request, limit_bytes=limit)
        if data is None:
            return FileWritten(received=request.offset + len(request.data))
        async with self._inside(request.sandbox_id, request.path, call) as (sandbox, channel):
            await channel.files.write(
                request.path, data, mode=request.mode, user=who(sandbox.origin, request.user)
            )
        return FileWritten(received=len(data))

    async def list(self, request: FilePath, call: Call) -> DirListing:
        async with self._inside(request.sandbox_id, request.path, call) as (sandbox, channel):
            user = who(sandbox.origin, request.user)
            found = await channel.files.list(request.path, max_entries=LIST_LIMIT, user=user)
        entries = tuple(_stat(entry, entry.name) for entry in found.entries)
        return DirListing(entries=entries, dropped=found.total - len(entries))

    async def stat(self, request: FilePath, call: Call) -> FileStat:
        async with self._inside(request.sandbox_id, request.path, call) as (sandbox, channel):
            user = who(sandbox.origin, request.user)
            return _stat(await channel.files.stat(request.path, user=user), request.path)

    async def remove(self, request: FileRemove, call: Call) -> Empty:
        async with self._inside(request.sandbox_id, request.path, call) as (sandbox, channel):
            await channel.files.remove(
                request.path,
                recursive=request.recursive,
                user=who(sandbox.origin, request.user),
            )
        return Empty()

    async def rename(self, request: FileRename, call: Call) -> Empty:
        async with self._inside(request.sandbox_id, request.path, call) as (sandbox, channel):
            user = who(sandbox.origin, request.user)
            await channel.files.rename(request.path, request.to, user=user)
        return Empty()

    async def make_dir(self, request: FileMakeDir, call: Call) -> Empty:
        async with self._inside(request.sandbox_id, request.path, call) as (sandbox, channel):
            await channel.files.make_dir(
                request.path,
                parents=request.parents,
                mode=request.mode,
                user=who(sandbox.origin, request.user),
            )
        return Empty()

    async def symlink(self, request: FileSymlink, call: Call) -> Empty:
        """With the sandbox's own `ln`: the agent has no operation for it. A file or link that is
        there is replaced, a directory never."""
        async with self._inside(request.sandbox_id, request.path, call) as (sandbox, channel):
            result = await channel.exec(
                ExecSpec(
                    exec_id=f"symlink-{random_token()}",
                    argv=("ln", "-sfT", "--", request.target, request.path),
                    env=environment(sandbox.origin, sandbox.status, {}),
                    user=who(sandbox.origin, request.user),
                    timeout_s=10.0,
                )
            )
        if result.exit_code == 127:
            raise Unsupported(f"{request.path}: the sandbox has no `ln` to make a link with")
        if result.exit_code != 0:
            said = result.stderr.decode(errors="replace").strip()[-200:]
            raise InvalidArgument(f"{request.path}: {said}")
        return Empty()

    @asynccontextmanager
    async def _inside(
        self, sandbox_id: str, path: str, call: Call
    ) -> AsyncIterator[tuple[Sandbox, AgentChannel]]:
        """Resumed and connected; what goes wrong inside leaves as an error about the path."""
        sandbox = self._table.find(call.project, sandbox_id)
        if not path or "\0" in path:
            raise InvalidArgument("a path is not empty and holds no NUL")
        async with self._pauses.active(sandbox):
            channel = await sandbox.holding.agent.channel()
            with translated(path):
                yield sandbox, channel


def _stat(entry: FileEntry, path: str) -> FileStat:
    return FileStat(
        path=_text(path),
        kind=_KINDS[entry.kind],
        size_bytes=entry.size,
        mode=entry.mode & 0o7777,
        uid=entry.uid,
        gid=entry.gid,
        mtime=entry.mtime_ns / 1e9,
        target=_text(entry.target) or None,
    )


def _text(name: str) -> str:
    """A file's name need not be UTF-8, a message's text must be."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
