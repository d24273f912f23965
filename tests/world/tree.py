"""Files of the small DSec: this machine's, below one directory."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from libdsec.bus import Bus, Call
from libdsec.errors import (
    Conflict,
    DSecError,
    FileNotFound,
    IsADirectory,
    NotADirectory,
    PermissionDenied,
)
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
from libdsec.wire.model import Empty
from libdsec.wire.subjects import (
    FILE_LIST,
    FILE_MAKE_DIR,
    FILE_READ,
    FILE_REMOVE,
    FILE_RENAME,
    FILE_STAT,
    FILE_SYMLINK,
    FILE_WRITE,
)

_TYPED: dict[int, type[DSecError]] = {
    errno.ENOENT: FileNotFound,
    errno.EISDIR: IsADirectory,
    errno.ENOTDIR: NotADirectory,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.ENOTEMPTY: Conflict,
}


class Tree:
    """Serves files. `list_limit` bounds a listing; `forged` replaces one, as a liar's would be."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.list_limit = 10_000
        self.forged: tuple[FileStat, ...] | None = None
        self.reads = 0
        self.change_during_read = 0
        self._partial: dict[str, bytearray] = {}

    async def serve(self, bus: Bus, node: str) -> None:
        to = {"project": "*", "node": node}
        await bus.serve(FILE_READ, self.read, **to)
        await bus.serve(FILE_WRITE, self.write, **to)
        await bus.serve(FILE_LIST, self.list, **to)
        await bus.serve(FILE_STAT, self.stat, **to)
        await bus.serve(FILE_REMOVE, self.remove, **to)
        await bus.serve(FILE_RENAME, self.rename, **to)
        await bus.serve(FILE_MAKE_DIR, self.make_dir, **to)
        await bus.serve(FILE_SYMLINK, self.symlink, **to)

    async def read(self, message: FileRead, call: Call) -> FileChunk:
        path = self._at(message.path)
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                file.seek(message.offset)
                data = file.read(message.max_bytes)
        except OSError as err:
            raise _typed(err) from err
        self.reads += 1
        version = f"{status.st_ino}.{status.st_mtime_ns}"
        if message.offset and self.change_during_read:
            self.change_during_read -= 1
            version = "changed"
        return FileChunk(
            data=data, size_bytes=status.st_size, version=version,
            eof=message.offset + len(data) >= status.st_size,
        )  # fmt: skip

    async def write(self, message: FileWrite, call: Call) -> FileWritten:
        partial = self._partial.setdefault(message.transfer_id, bytearray())
        partial[message.offset :] = message.data
        if message.last:
            path = self._at(message.path)
            try:
                if path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
                new = path.with_name(f".{path.name}.new")
                new.write_bytes(partial)
                kept = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
                new.chmod(kept if message.mode is None else message.mode)
                new.replace(path)
            except OSError as err:
                raise _typed(err) from err
            del self._partial[message.transfer_id]
        return FileWritten(received=len(partial))

    async def list(self, message: FilePath, call: Call) -> DirListing:
        if self.forged is not None:
            forged, self.forged = self.forged, ()
            return DirListing(entries=forged)
        try:
            names = sorted(os.listdir(self._at(message.path)))
        except OSError as err:
            raise _typed(err) from err
        kept = names[: self.list_limit]
        entries = tuple(_stat(self._at(message.path) / name) for name in kept)
        return DirListing(entries=entries, dropped=len(names) - len(kept))

    async def stat(self, message: FilePath, call: Call) -> FileStat:
        try:
            return _stat(self._at(message.path))
        except OSError as err:
            raise _typed(err) from err

    async def remove(self, message: FileRemove, call: Call) -> Empty:
        path = self._at(message.path)
        try:
            if not path.is_dir() or path.is_symlink():
                path.unlink()
            elif message.recursive:
                shutil.rmtree(path)
            else:
                path.rmdir()
        except OSError as err:
            raise _typed(err) from err
        return Empty()

    async def rename(self, message: FileRename, call: Call) -> Empty:
        try:
            self._at(message.path).rename(self._at(message.to))
        except OSError as err:
            raise _typed(err) from err
        return Empty()

    async def make_dir(self, message: FileMakeDir, call: Call) -> Empty:
        path = self._at(message.path)
        try:
            path.mkdir(parents=message.parents, exist_ok=message.parents)
            path.chmod(message.mode)
        except FileExistsError as err:
            raise NotADirectory(f"{message.path} is there and is no directory") from err
        except OSError as err:
            raise _typed(err) from err
        return Empty()

    async def symlink(self, message: FileSymlink, call: Call) -> Empty:
        path = self._at(message.path)
        path.unlink(missing_ok=True)
        path.symlink_to(message.target)
        return Empty()

    def _at(self, path: str) -> Path:
        return self.home / path  # an absolute path is itself


def _stat(path: Path) -> FileStat:
    status = path.lstat()
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "dir"), (stat.S_ISLNK, "link"))
    kind = next((name for test, name in kinds if test(status.st_mode)), "other")
    return FileStat(
        path=str(path),
        kind=kind,
        size_bytes=status.st_size,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime=status.st_mtime,
        target=str(path.readlink()) if kind == "link" else None,
    )


def _typed(err: OSError) -> DSecError:
    kind = _TYPED.get(err.errno or 0, PermissionDenied)
    return kind(f"{err.filename}: {err.strerror}")
