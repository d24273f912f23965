"""The writable layer of a sandbox, with a hard limit on bytes and on files.

Two ways, told apart by :class:`DiskMode`: a directory under a project quota where the node's file
system has one, else a sparse ext4 image of the exact size on a loop device of its own, taken from
a pool of prepared ones. Either way ``statfs`` inside the sandbox tells the truth.

What a crash leaves is files, and files are found by name: a loop mount lives by descriptor only,
and when its last user (the edge's descriptor or the sandbox's overlay) is gone the kernel unmounts
it and frees the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from libhost.disk_loop import LoopDisk
from libhost.disk_quota import QuotaDisk
from libhost.overlay import OverlayMode
from libhost.paths import NodePaths, SandboxPaths
from libhost.writable import DiskLimits, DiskMode, DiskUsage, Place, WritableLayer, empty_trash

__all__ = [
    "Disk",
    "DiskLimits",
    "DiskMode",
    "DiskUsage",
    "Place",
    "WritableLayer",
    "empty_trash",
    "open_disk",
]


class Disk(Protocol):
    """Where writable layers come from. Any thread may call any method."""

    @property
    def mode(self) -> DiskMode: ...

    def create(self, sandbox: SandboxPaths, limits: DiskLimits) -> WritableLayer:
        """Makes the state directory. FileExistsError if the sandbox has a disk already."""

    def open(self, sandbox: SandboxPaths) -> WritableLayer:
        """The existing one of a sandbox (live or not), as for packing what it wrote."""

    def usage(self, sandbox: SandboxPaths) -> DiskUsage: ...

    def discard(self, sandbox: SandboxPaths) -> None:
        """Move the sandbox's state to the trash; idempotent; its cost is one rename."""

    def refill(self, sizes: Sequence[DiskLimits], *, at_most: int) -> int:
        """Prepare what :meth:`create` will want next, the first size first; returns how many it
        prepared: fewer than ``at_most`` when nothing is left to do."""

    def close(self) -> None:
        """Give the prepared ones back."""


def open_disk(
    paths: NodePaths, mode: DiskMode, overlay: OverlayMode, *, pool_size: int = 8
) -> Disk:
    """The disk of this node in the mode its probe found."""
    if mode is DiskMode.QUOTA:
        return QuotaDisk(paths)
    return LoopDisk(paths, overlay, pool_size=pool_size)
