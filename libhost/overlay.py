"""A sandbox's root: an overlay of read-only layers and one writable directory.

:func:`plan_overlay` is pure and yields the operations in order; :func:`apply` carries them out and
returns a detached mount: the root appears in no mount table of the node, so a killed edge leaves
none behind. At most 500 layers (the kernel's limit).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from libhost import syscall

MAX_LOWERS = 500


class OverlayMode(StrEnum):
    """How a directory is named to the kernel, best first; which one works is probed.

    PROC_FD and SET_FD take detached mounts; PATHS needs every one of them at a path.
    """

    SET_FD = "set_fd"
    PROC_FD = "proc_fd"
    PATHS = "paths"


class Directory(Protocol):
    """Something to stack: a descriptor always, a path where it has one."""

    @property
    def fd(self) -> int: ...

    @property
    def path(self) -> Path | None: ...


@dataclass(frozen=True)
class SetFlag:
    key: str

    def describe(self) -> str:
        return self.key

    def execute(self, fs_fd: int) -> None:
        syscall.fsconfig_set_flag(fs_fd, self.key)


@dataclass(frozen=True)
class SetString:
    key: str
    value: str

    def describe(self) -> str:
        return f"{self.key}={self.value}"

    def execute(self, fs_fd: int) -> None:
        syscall.fsconfig_set_string(fs_fd, self.key, self.value)


@dataclass(frozen=True)
class SetFd:
    key: str
    fd: int

    def describe(self) -> str:
        return f"{self.key}=fd:{self.fd}"

    def execute(self, fs_fd: int) -> None:
        syscall.fsconfig_set_fd(fs_fd, self.key, self.fd)


@dataclass(frozen=True)
class SetPath:
    """A path, shown to the kernel as a descriptor of it: the sandbox can read its mount options,
    and the host's directories are none of its business."""

    key: str
    path: Path

    def describe(self) -> str:
        return f"{self.key}={self.path}"

    def execute(self, fs_fd: int) -> None:
        fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Resolved at once, so the descriptor need not outlive the call.
            syscall.fsconfig_set_string(fs_fd, self.key, f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)


OverlayOp = SetFlag | SetString | SetFd | SetPath

# redirect_dir: without it rename(2) of a directory from a layer is EXDEV, and `git mv` fails.
# index, metacopy: an upper must mean the same on top of the same layers in another place.
# volatile: a sandbox does not survive its node, so fsync inside need not reach the disk. The kernel
# leaves a mark in the work directory that refuses a second overlay on it.
_OPTIONS: tuple[OverlayOp, ...] = (
    SetString("redirect_dir", "on"),
    SetString("index", "off"),
    SetString("metacopy", "off"),
    SetFlag("volatile"),
)


def plan_overlay(
    lowers: Sequence[Directory], upper: Directory, work: Directory, mode: OverlayMode
) -> tuple[OverlayOp, ...]:
    """``lowers`` from the bottom (base) to the top (last toolkit)."""
    if not 1 <= len(lowers) <= MAX_LOWERS:
        raise ValueError(f"an overlay takes 1 to {MAX_LOWERS} layers, not {len(lowers)}")
    return (
        *(_name(mode, "lowerdir+", lower) for lower in reversed(lowers)),
        _name(mode, "upperdir", upper),
        _name(mode, "workdir", work),
        *_OPTIONS,
    )


def _name(mode: OverlayMode, key: str, directory: Directory) -> OverlayOp:
    if mode is OverlayMode.SET_FD:
        return SetFd(key, directory.fd)
    if mode is OverlayMode.PROC_FD:
        return SetString(key, f"/proc/self/fd/{directory.fd}")
    if directory.path is None:
        raise ValueError(f"{key}: this kernel takes paths only, and fd {directory.fd} has none")
    return SetPath(key, directory.path)


def apply(plan: Sequence[OverlayOp]) -> int:
    """Mount; returns the detached mount's descriptor (close it after the container started)."""
    fs = syscall.fsopen("overlay")
    try:
        for op in plan:
            op.execute(fs)
        syscall.fsconfig_create(fs)
        return syscall.fsmount(fs, syscall.MOUNT_ATTR_NODEV)
    finally:
        os.close(fs)
