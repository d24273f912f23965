"""Values and directories of writable layers, whatever enforces their limit.

What is here is shared by the ways of :mod:`libhost.disk`: how a limit is stated, how the writable
directories of one sandbox are held, and the trash that what a sandbox wrote goes to.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from libhost import syscall
from libhost.paths import NodePaths

# One inode for this many bytes when the caller sets no limit: mkfs.ext4's own density.
BYTES_PER_FILE = 16384
MIN_FILES = 1024


class DiskMode(StrEnum):
    """How the limit is enforced on this node."""

    QUOTA = "quota"
    LOOP = "loop"


@dataclass(frozen=True)
class DiskLimits:
    """``max_files`` None: as many as the size allows at the usual density (one per 16 KiB)."""

    size_mib: int
    max_files: int | None = None

    @property
    def files(self) -> int:
        return self.max_files or max(MIN_FILES, (self.size_mib << 20) // BYTES_PER_FILE)


@dataclass(frozen=True)
class DiskUsage:
    used_bytes: int
    limit_bytes: int
    used_files: int
    limit_files: int


@dataclass(frozen=True)
class Place:
    """A directory by descriptor, and by path where it has one in our mount table."""

    fd: int
    path: Path | None


@dataclass(frozen=True)
class WritableLayer:
    """Upper and work directory of one sandbox. create -> overlay -> close; open again to pack it.

    The edge holds at most one per sandbox: the kernel would allow a second overlay on it.
    ``root_fd`` is what they are in: a detached mount ends with its descriptor, whatever else is
    open in it. ``attached`` is its path where the kernel takes only paths.
    """

    root_fd: int
    upper: Place
    work: Place
    attached: Path | None = None

    def close(self) -> None:
        """Give up the descriptors; a running sandbox keeps the disk."""
        for fd in (self.upper.fd, self.work.fd, self.root_fd):
            os.close(fd)
        if self.attached is not None:
            # The overlay holds a clone of its own.
            syscall.umount2(str(self.attached), syscall.MNT_DETACH)


def open_places(root_fd: int, path: Path | None, *, attached: Path | None = None) -> WritableLayer:
    """The ``upper`` and ``work`` below a directory, made if need be. Takes over ``root_fd``."""
    opened = [root_fd]
    try:
        for name in ("upper", "work"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=root_fd)
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            opened.append(os.open(name, flags, dir_fd=root_fd))
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    upper, work = (path / name if path else None for name in ("upper", "work"))
    return WritableLayer(root_fd, Place(opened[1], upper), Place(opened[2], work), attached)


def usage_of(directory_fd: int) -> DiskUsage:
    stat = os.statvfs(directory_fd)
    return DiskUsage(
        used_bytes=(stat.f_blocks - stat.f_bfree) * stat.f_frsize,
        limit_bytes=stat.f_blocks * stat.f_frsize,
        used_files=stat.f_files - stat.f_ffree,
        limit_files=stat.f_files,
    )


def move_to_trash(paths: NodePaths, directory: Path) -> None:
    """Rename into the trash; idempotent."""
    paths.trash_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        directory.rename(paths.trash_dir / f"{directory.name}.{secrets.token_hex(4)}")


def empty_trash(paths: NodePaths, *, budget_files: int) -> int:
    """Delete at most ``budget_files`` files and directories of the trash; returns how many went.

    The budget is what makes it paced: a sandbox with a million files must not stall the node.
    """
    deleted = 0
    if not paths.trash_dir.is_dir():
        return 0
    for directory, names, files in os.walk(paths.trash_dir, topdown=False):
        here = Path(directory)
        for name in files:
            if deleted >= budget_files:
                return deleted
            (here / name).unlink(missing_ok=True)
            deleted += 1
        for name in names:
            if deleted >= budget_files:
                return deleted
            child = here / name
            child.unlink() if child.is_symlink() else child.rmdir()
            deleted += 1
    return deleted
