"""Files inside a sandbox; paths are resolved inside its root and never followed out of it."""

from __future__ import annotations

from .model import Message


class FileRead(Message):
    sandbox_id: str
    path: str
    offset: int = 0
    max_bytes: int
    user: str | None = None


class FileChunk(Message):
    data: bytes
    size_bytes: int  # of the whole file
    eof: bool
    version: str  # inode and mtime: a reader of several chunks notices a change


class FileWrite(Message):
    """One chunk. The file appears, whole, with the chunk marked `last`."""

    sandbox_id: str
    path: str
    transfer_id: str
    offset: int
    data: bytes
    last: bool
    mode: int | None = None
    user: str | None = None


class FileWritten(Message):
    received: int


class FilePath(Message):
    sandbox_id: str
    path: str
    user: str | None = None


class FileRemove(FilePath):
    recursive: bool = False


class FileRename(FilePath):
    to: str


class FileMakeDir(FilePath):
    mode: int = 0o755
    parents: bool = True


class FileSymlink(FilePath):
    """Replaces a file or a link at `path`, never a directory."""

    target: str


class FileStat(Message):
    path: str
    kind: str  # file | dir | link | other
    size_bytes: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None  # of a symbolic link


class DirListing(Message):
    entries: tuple[FileStat, ...]
    dropped: int = 0
