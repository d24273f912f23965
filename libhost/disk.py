"""The writable layer of a sandbox, with a hard limit on bytes and on files.

Two ways, told apart by :class:`DiskMode`: a directory under a project quota where
the node's file system has one, else a sparse ext4 image of the exact size on a loop device of its
own, taken from a pool of prepared ones. Either way ``statfs`` inside the sandbox tells the truth.

A loop mount lives by descriptor only: it is in no mount table, and when its last user (the edge's
descriptor or the sandbox's overlay) is gone the kernel unmounts it and frees the loop device. What
a crash leaves is therefore files, and files are found by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from libhost.paths import NodePaths, SandboxPaths


class DiskMode(StrEnum):
    """How the limit is enforced on this node."""

    QUOTA = "quota"
    LOOP = "loop"


@dataclass(frozen=True)
class DiskLimits:
    """``max_files`` None: as many as the size allows at the usual density (one per 16 KiB)."""

    size_mib: int
    max_files: int | None = None


@dataclass(frozen=True)
class DiskUsage:
    used_bytes: int
    limit_bytes: int
    used_files: int
    limit_files: int


@dataclass(frozen=True)
class WritableLayer:
    """Upper and work directory of one sandbox. create -> overlay -> close; open again to pack it.

    The edge holds at most one per sandbox: the kernel would allow a second overlay on it.
    """

    upper_fd: int
    work_fd: int

    def close(self) -> None:
        """Give up the descriptors; a running sandbox keeps the disk."""
        raise NotImplementedError


class Disk(Protocol):
    """Where writable layers come from."""

    mode: DiskMode

    def create(self, sandbox: SandboxPaths, limits: DiskLimits) -> WritableLayer:
        """Raises FileExistsError if the sandbox has one, OSError ENOSPC if the host is full."""

    def open(self, sandbox: SandboxPaths) -> WritableLayer:
        """The existing one of a sandbox (live or not), as for packing what it wrote."""

    def usage(self, sandbox: SandboxPaths) -> DiskUsage: ...

    def discard(self, sandbox: SandboxPaths) -> None:
        """Move the sandbox's state to the trash; idempotent; O(1)."""

    def refill(self, sizes: Sequence[DiskLimits]) -> int:
        """Prepare what :meth:`create` will want next; returns how many it prepared."""

    def close(self) -> None:
        """Give the prepared ones back."""


def open_disk(paths: NodePaths, mode: DiskMode, *, pool_size: int = 8) -> Disk:
    """The disk of this node in the mode its probe found."""
    raise NotImplementedError


def empty_trash(paths: NodePaths, *, budget_files: int) -> int:
    """Delete at most ``budget_files`` files of the trash; returns how many went. Call it paced."""
    raise NotImplementedError
