"""Files inside a sandbox, as its own user would see them.

Paths are resolved by the agent inside the sandbox's root and never followed out of it. What fits in
one message goes with the commands; more goes over the bulk connection.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from .bounded import BoundedList
from .callback import Callback
from .connection import Connection
from .errors import Conflict, FileNotFound, InvalidArgument, NotADirectory
from .operation import Operation
from .transfer import Transferred, download, upload
from .wire.defaults import FILE_CHUNK_BYTES
from .wire.envelope import Rpc
from .wire.files import (
    FileMakeDir,
    FilePath,
    FileRead,
    FileRemove,
    FileRename,
    FileStat,
    FileSymlink,
    FileWrite,
)
from .wire.ids import sandbox_node
from .wire.model import Message, random_token
from .wire.subjects import (
    FILE_LIST,
    FILE_MAKE_DIR,
    FILE_READ,
    FILE_REMOVE,
    FILE_RENAME,
    FILE_STAT,
    FILE_SYMLINK,
    FILE_WRITE,
)

Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)

MAX_READ_BYTES = 100 << 20
_CHANGES = 3  # times a file may change under a reader before the reader gives up


class Files:
    """The files of one sandbox.

    Errors are typed: PermissionDenied, Conflict, and FileNotFound, IsADirectory, NotADirectory,
    which are the builtin OSErrors of their kind as well.
    """

    def __init__(self, connection: Connection, sandbox_id: str) -> None:
        self._connection = connection
        self._sandbox_id = sandbox_id
        self._node = sandbox_node(sandbox_id)

    async def read(
        self, path: str, max_bytes: int = MAX_READ_BYTES, *, user: str | None = None
    ) -> bytes:
        """The whole file.

        Raises:
            InvalidArgument: it is larger than `max_bytes`; nothing is cut off silently.
            Conflict: it kept changing while it was read.
        """
        with self._connection.operation("files.read", node=self._node) as op:
            for _ in range(_CHANGES):
                data = bytearray()
                try:
                    async with aclosing(self.chunks(op, path, user)) as chunks:
                        async for chunk in chunks:
                            data += chunk
                            if len(data) > max_bytes:
                                raise InvalidArgument(
                                    f"{path} has more than max_bytes={max_bytes}",
                                    hint="raise it, or use files.download, which streams",
                                )
                    return bytes(data)
                except Conflict as err:
                    changed = err
            raise changed

    async def read_text(
        self, path: str, max_bytes: int = MAX_READ_BYTES, *, user: str | None = None
    ) -> str:
        """The whole file as UTF-8; newlines as they are.

        Raises:
            UnicodeDecodeError: it is not UTF-8.
        """
        return (await self.read(path, max_bytes, user=user)).decode()

    async def write(
        self, path: str, data: bytes | str, mode: int | None = None, *, user: str | None = None
    ) -> None:
        """Replace or create the file, whole or not at all; missing directories are made.

        Args:
            mode: None keeps an existing file's mode, and is 0644 for a new one.
        """
        raw = data.encode() if isinstance(data, str) else data
        with self._connection.operation("files.write", node=self._node) as op:
            try:
                await self.write_chunks(op, path, _pieces(raw), mode, user)
            except FileNotFound:
                await self.make_parent(op, path, user)
                await self.write_chunks(op, path, _pieces(raw), mode, user)

    async def list(self, path: str, *, user: str | None = None) -> BoundedList[FileStat]:
        """A directory's entries in no order, `path` being the name; links as links."""
        with self._connection.operation("files.list", node=self._node) as op:
            return await self.entries(op, path, user)

    async def stat(self, path: str, *, user: str | None = None) -> FileStat:
        """What is there; a symbolic link itself, not what it points to."""
        with self._connection.operation("files.stat", node=self._node) as op:
            return await self.look(op, path, user)

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether anything is there, a dangling link included."""
        try:
            await self.stat(path, user=user)
        except (FileNotFound, NotADirectory):
            return False
        return True

    async def remove(
        self, path: str, *, recursive: bool = False, user: str | None = None
    ) -> None:  # fmt: skip
        """Remove a file, a link, an empty directory, or with `recursive` a whole tree."""
        with self._connection.operation("files.remove", node=self._node) as op:
            message = FileRemove(
                sandbox_id=self._sandbox_id, path=_checked(path), recursive=recursive, user=user
            )
            await self.call(op, FILE_REMOVE, message)

    async def rename(self, path: str, to: str, *, user: str | None = None) -> None:
        """Rename; an existing file at `to` is replaced."""
        with self._connection.operation("files.rename", node=self._node) as op:
            message = FileRename(
                sandbox_id=self._sandbox_id, path=_checked(path), to=_checked(to), user=user
            )
            await self.call(op, FILE_RENAME, message)

    async def make_dir(
        self, path: str, mode: int = 0o755, *, parents: bool = True, user: str | None = None
    ) -> None:
        """Make a directory; with `parents` it may be there already, and gets this mode."""
        with self._connection.operation("files.make_dir", node=self._node) as op:
            await self.make(op, path, mode, user, parents=parents)

    async def upload(
        self,
        local: str | Path,
        remote: str,
        *,
        user: str | None = None,
        on_progress: Callback[Transferred] | None = None,
    ) -> Transferred:
        """Copy a local file to the path `remote`, or a local directory's contents into it.

        Modes are kept, symbolic links stay links; anything else (sockets, devices) is refused
        before the first byte is sent.
        """
        with self._connection.operation("files.upload", node=self._node) as op:
            return await upload(self, op, Path(local), _checked(remote), user, on_progress)

    async def download(
        self,
        remote: str,
        local: str | Path,
        *,
        user: str | None = None,
        on_progress: Callback[Transferred] | None = None,
    ) -> Transferred:
        """Copy a file to the local path, or a directory's contents into the local directory.

        Whatever the sandbox claims its tree to be, nothing outside `local` is written.
        """
        with self._connection.operation("files.download", node=self._node) as op:
            return await download(self, op, _checked(remote), Path(local), user, on_progress)

    # --- within a call that is already under way: what a transfer is made of ----------------------

    async def chunks(
        self, op: Operation, path: str, user: str | None
    ) -> AsyncGenerator[bytes, None]:
        """A file's content in order.

        Raises:
            Conflict: it changed meanwhile.
        """
        offset, version = 0, ""
        while True:
            message = FileRead(
                sandbox_id=self._sandbox_id, path=_checked(path), offset=offset,
                max_bytes=FILE_CHUNK_BYTES, user=user,
            )  # fmt: skip
            chunk = await self.call(op, FILE_READ, message, bulk=offset > 0)
            if version and chunk.version != version:
                raise Conflict(f"{path} changed while it was read", hint="read it again")
            version = chunk.version
            if chunk.data:
                yield chunk.data
            if chunk.eof or not chunk.data:
                return
            offset += len(chunk.data)

    async def write_chunks(
        self,
        op: Operation,
        path: str,
        pieces: Callable[[int], Awaitable[bytes]],
        mode: int | None,
        user: str | None,
    ) -> int:
        """Write what `pieces(size)` gives until it gives less; returns how much that was."""
        transfer_id, offset = random_token(), 0
        while True:
            data = await pieces(FILE_CHUNK_BYTES)
            last = len(data) < FILE_CHUNK_BYTES
            message = FileWrite(
                sandbox_id=self._sandbox_id, path=_checked(path), transfer_id=transfer_id,
                offset=offset, data=data, last=last, mode=mode, user=user,
            )  # fmt: skip
            await self.call(op, FILE_WRITE, message, bulk=offset > 0 or not last)
            offset += len(data)
            if last:
                return offset

    async def look(self, op: Operation, path: str, user: str | None) -> FileStat:
        return await self.call(op, FILE_STAT, self._at(path, user))

    async def entries(
        self, op: Operation, path: str, user: str | None
    ) -> BoundedList[FileStat]:  # fmt: skip
        listing = await self.call(op, FILE_LIST, self._at(path, user))
        return BoundedList(listing.entries, listing.dropped)

    async def make(
        self, op: Operation, path: str, mode: int, user: str | None, *, parents: bool = True
    ) -> None:
        message = FileMakeDir(
            sandbox_id=self._sandbox_id, path=_checked(path), mode=mode, parents=parents, user=user
        )
        await self.call(op, FILE_MAKE_DIR, message)

    async def make_parent(self, op: Operation, path: str, user: str | None) -> None:
        """Make the directories above `path` that are missing; those that are there stay as is."""
        parent = posixpath.dirname(path.rstrip("/"))
        if parent:
            try:
                await self.look(op, parent, user)
            except FileNotFound:
                await self.make(op, parent, 0o755, user)

    async def link(self, op: Operation, path: str, target: str, user: str | None) -> None:
        message = FileSymlink(
            sandbox_id=self._sandbox_id, path=_checked(path), target=target, user=user
        )
        await self.call(op, FILE_SYMLINK, message)

    async def call(
        self, op: Operation, rpc: Rpc[Req, Rep], message: Req, *, bulk: bool = False
    ) -> Rep:
        return await self._connection.call(
            rpc, message, op=op, node=self._node, bulk=bulk, idempotent=_same_twice(message)
        )

    def _at(self, path: str, user: str | None) -> FilePath:
        return FilePath(sandbox_id=self._sandbox_id, path=_checked(path), user=user)


def _same_twice(message: Message) -> bool:
    """Whether doing it again, even while it is being done, is as good as once."""
    match message:
        case FileRemove() | FileRename():
            return False
        case FileMakeDir(parents=parents):
            return parents
        case FileWrite(offset=offset, last=last):
            return offset == 0 or not last  # the last of several chunks ends their transfer
        case _:
            return True


def _pieces(data: bytes) -> Callable[[int], Awaitable[bytes]]:
    taken = 0

    async def next_piece(size: int) -> bytes:
        nonlocal taken
        piece = data[taken : taken + size]
        taken += len(piece)
        return piece

    return next_piece


def _checked(path: str) -> str:
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidArgument(f"path {path!r} is not a path")
    return path
