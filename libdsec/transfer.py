"""Trees between the local disk and a sandbox: chunked, a few files at a time, links kept.

An upload is planned first, so that what cannot be sent is refused before anything is. A download
trusts nothing that the other side says: names are single components, every local step is relative
to a directory already opened without following links, and set-uid bits are not brought home.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import stat
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .callback import Callback, notify
from .concurrent import for_each
from .errors import DataLoss, InvalidArgument, IsADirectory
from .operation import Operation
from .wire.files import FileStat
from .wire.model import random_token

if TYPE_CHECKING:
    from .files import Files

_PARALLEL = 8
_MAX_DEPTH = 128
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OWNER = stat.S_IRWXU


@dataclass(frozen=True)
class Transferred:
    """What has been copied so far."""

    files: int = 0
    directories: int = 0
    links: int = 0
    size_bytes: int = 0


class _Tally:
    """Counts, and tells whoever wants to know."""

    def __init__(self, on_progress: Callback[Transferred] | None) -> None:
        self.total = Transferred()
        self._on_progress = on_progress

    async def add(
        self, *, files: int = 0, directories: int = 0, links: int = 0, size_bytes: int = 0
    ) -> None:
        so_far = self.total
        self.total = Transferred(
            files=so_far.files + files,
            directories=so_far.directories + directories,
            links=so_far.links + links,
            size_bytes=so_far.size_bytes + size_bytes,
        )
        await notify(self._on_progress, self.total)


@dataclass(frozen=True)
class LocalEntry:
    """One thing to upload; `remote` is where it goes."""

    local: Path
    remote: str
    mode: int
    target: str | None = None  # of a symbolic link


@dataclass(frozen=True)
class UploadPlan:
    """Directories come parents first."""

    directories: tuple[LocalEntry, ...] = ()
    files: tuple[LocalEntry, ...] = ()
    links: tuple[LocalEntry, ...] = ()


def plan_upload(local: Path, remote: str) -> UploadPlan:
    """What is to be sent where.

    Raises:
        InvalidArgument: something in it is neither file, directory nor symbolic link.
        FileNotFoundError: there is nothing at `local`.
    """
    root = local.resolve(strict=True)
    mode = root.stat().st_mode
    if stat.S_ISREG(mode):
        inside = posixpath.join(remote, local.name) if remote.endswith("/") else remote
        return UploadPlan(files=(LocalEntry(root, inside, stat.S_IMODE(mode)),))
    _refuse_special(root, mode)
    top = LocalEntry(root, remote, stat.S_IMODE(mode))
    directories, files, links = [top], [], []
    waiting = [top]
    while waiting:
        parent = waiting.pop()
        for found in sorted(os.scandir(parent.local), key=lambda item: item.name):
            mode = found.stat(follow_symlinks=False).st_mode
            entry = LocalEntry(
                Path(found.path), posixpath.join(parent.remote, found.name), stat.S_IMODE(mode)
            )
            if stat.S_ISLNK(mode):
                links.append(replace(entry, target=str(entry.local.readlink())))
            elif stat.S_ISDIR(mode):
                directories.append(entry)
                waiting.append(entry)
            else:
                _refuse_special(entry.local, mode)
                files.append(entry)
    return UploadPlan(tuple(directories), tuple(files), tuple(links))


async def upload(
    files: Files,
    op: Operation,
    local: Path,
    remote: str,
    user: str | None,
    on_progress: Callback[Transferred] | None,
) -> Transferred:
    plan = await asyncio.to_thread(plan_upload, local, remote)
    tally = _Tally(on_progress)
    if not plan.directories:  # a single file
        await files.make_parent(op, plan.files[0].remote, user)
    for directory in plan.directories:
        # Its owner must be able to write into it until it is filled.
        await files.make(op, directory.remote, directory.mode | _OWNER, user)
        await tally.add(directories=1)

    async def send(entry: LocalEntry) -> None:
        with await asyncio.to_thread(entry.local.open, "rb") as file:

            async def pieces(size: int) -> bytes:
                data = await asyncio.to_thread(file.read, size)
                await tally.add(size_bytes=len(data))
                return data

            await files.write_chunks(op, entry.remote, pieces, entry.mode, user)
        await tally.add(files=1)

    await for_each(plan.files, send, limit=_PARALLEL)
    for link in plan.links:
        await files.link(op, link.remote, link.target or "", user)
        await tally.add(links=1)
    for directory in reversed(plan.directories):
        if directory.mode | _OWNER != directory.mode:
            await files.make(op, directory.remote, directory.mode, user)
    return tally.total


async def download(
    files: Files,
    op: Operation,
    remote: str,
    local: Path,
    user: str | None,
    on_progress: Callback[Transferred] | None,
) -> Transferred:
    tree = _Download(files, op, user, _Tally(on_progress))
    there = await files.look(op, remote, user)
    if there.kind != "dir":
        target = local / posixpath.basename(remote) if local.is_dir() else local
        parent = os.open(target.parent, _DIRECTORY & ~os.O_NOFOLLOW)
        try:
            # A link named by the caller is followed, inside the sandbox's root, by the reading.
            mode = there.mode if there.kind == "file" else 0o644
            await tree.file(remote, parent, target.name, mode)
            return tree.tally.total
        except IsADirectory:
            pass
        finally:
            os.close(parent)
    local.mkdir(exist_ok=True)
    top = os.open(local, _DIRECTORY & ~os.O_NOFOLLOW)
    try:
        await tree.directory(remote, top, depth=0)
        if there.kind == "dir":
            os.fchmod(top, there.mode & 0o777)
    finally:
        os.close(top)
    return tree.tally.total


class _Download:
    """One download under way."""

    def __init__(self, files: Files, op: Operation, user: str | None, tally: _Tally) -> None:
        self._files = files
        self._op = op
        self._user = user
        self.tally = tally

    async def directory(self, remote: str, into: int, depth: int) -> None:
        """A remote directory's entries into the open local one."""
        if depth > _MAX_DEPTH:
            raise InvalidArgument(f"{remote} is more than {_MAX_DEPTH} directories deep")
        entries = await self._files.entries(self._op, remote, self._user)
        if entries.dropped:
            raise DataLoss(
                f"{remote} has {entries.dropped} entries more than can be listed at once",
                hint="pack it inside the sandbox and download the archive",
            )
        await self.tally.add(directories=1)
        named = [(entry_name(entry, remote), entry) for entry in entries]

        async def fetch(item: tuple[str, FileStat]) -> None:
            name, entry = item
            await self.file(posixpath.join(remote, name), into, name, entry.mode)

        await for_each([i for i in named if i[1].kind == "file"], fetch, limit=_PARALLEL)
        for name, entry in named:
            if entry.kind == "link":
                _replace_link(into, name, entry.target or "")
                await self.tally.add(links=1)
            elif entry.kind == "dir":
                await self._subdirectory(posixpath.join(remote, name), into, name, entry, depth)

    async def file(self, remote: str, into: int, name: str, mode: int) -> None:
        """A remote file as `name` in the open directory: whole, or not at all."""
        temporary = f".{name[:200]}.{random_token(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=into)
        try:
            with os.fdopen(descriptor, "wb") as file:
                chunks = self._files.chunks(self._op, remote, self._user)
                async with aclosing(chunks):
                    async for chunk in chunks:
                        await asyncio.to_thread(file.write, chunk)
                        await self.tally.add(size_bytes=len(chunk))
                os.fchmod(file.fileno(), mode & 0o777)
            os.replace(temporary, name, src_dir_fd=into, dst_dir_fd=into)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=into)
            raise
        await self.tally.add(files=1)

    async def _subdirectory(
        self, remote: str, into: int, name: str, entry: FileStat, depth: int
    ) -> None:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=into)
        inside = os.open(name, _DIRECTORY, dir_fd=into)
        try:
            await self.directory(remote, inside, depth + 1)
            os.fchmod(inside, entry.mode & 0o777)
        finally:
            os.close(inside)


def entry_name(entry: FileStat, where: str) -> str:
    """An entry's name, if it is one: the other side must not choose where we write."""
    name = posixpath.basename(entry.path)
    if name in ("", ".", "..") or "\0" in name:
        raise DataLoss(f"{where} lists an entry named {entry.path!r}")
    return name


def _replace_link(into: int, name: str, target: str) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=into, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=into)
    os.symlink(target, name, dir_fd=into)


def _refuse_special(path: Path, mode: int) -> None:
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InvalidArgument(
            f"{path} is neither a file, a directory nor a symbolic link",
            hint="leave it out of the tree",
        )
