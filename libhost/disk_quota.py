"""Writable layers as directories under a project quota (ext4 or xfs mounted with prjquota).

A sandbox's project id is the number of its directory tree, inherited by what is made in it. It is
read back from the directory and stored nowhere else. A process with CAP_SYS_RESOURCE is not held by
the limit, and one that may change project ids leaves it: the sandbox can do neither (see
:mod:`libhost.seccomp`).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libhost import syscall
from libhost.paths import NodePaths, SandboxPaths
from libhost.writable import (
    DiskLimits,
    DiskMode,
    DiskUsage,
    WritableLayer,
    move_to_trash,
    open_places,
)

_FS_IOC_FSGETXATTR = 0x801C581F
_FS_IOC_FSSETXATTR = 0x401C5820
# struct fsxattr: xflags, extsize, nextents, projid, cowextsize, padding.
_FSXATTR = struct.Struct("=5I8x")
_PROJECT_INHERIT = 0x200
# Q_{GET,SET}QUOTA << 8 | PRJQUOTA. struct if_dqblk: limits in KiB, use in bytes, then times, mask.
_GET_QUOTA = 0x800007 << 8 | 2
_SET_QUOTA = 0x800008 << 8 | 2
_DQBLK = struct.Struct("=8QI4x")
_LIMITS_VALID = 1 | 4  # QIF_BLIMITS | QIF_ILIMITS
_KIB = 1 << 10
_ATTEMPTS = 32


@dataclass(frozen=True)
class _Quota:
    limit_bytes: int
    used_bytes: int
    limit_files: int
    used_files: int

    @property
    def unused(self) -> bool:
        return not any((self.limit_bytes, self.used_bytes, self.limit_files, self.used_files))


class QuotaDisk:
    """create, discard. There is nothing to prepare: a directory costs about nothing."""

    mode = DiskMode.QUOTA

    def __init__(self, paths: NodePaths) -> None:
        self._paths = paths
        paths.sandboxes_dir.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self, sandbox: SandboxPaths, limits: DiskLimits) -> WritableLayer:
        sandbox.state_dir.mkdir(mode=0o700, exist_ok=True)
        sandbox.disk_dir.mkdir(mode=0o700)
        root_fd = _open(sandbox.disk_dir)
        try:
            project = _free_project(root_fd, sandbox.sandbox_id)
            # The limit stands before the first file can be made under it.
            _set_limits(root_fd, project, limits)
            _set_project(root_fd, project)
        except BaseException:
            os.close(root_fd)
            raise
        return open_places(root_fd, sandbox.disk_dir)

    def open(self, sandbox: SandboxPaths) -> WritableLayer:
        return open_places(_open(sandbox.disk_dir), sandbox.disk_dir)

    def usage(self, sandbox: SandboxPaths) -> DiskUsage:
        root_fd = _open(sandbox.disk_dir)
        try:
            quota = _get_quota(root_fd, _project_of(root_fd))
        finally:
            os.close(root_fd)
        return DiskUsage(quota.used_bytes, quota.limit_bytes, quota.used_files, quota.limit_files)

    def discard(self, sandbox: SandboxPaths) -> None:
        # With its limits gone too, a project whose last file is deleted is free to be taken again.
        if sandbox.disk_dir.is_dir():
            root_fd = _open(sandbox.disk_dir)
            try:
                _set_quota(root_fd, _project_of(root_fd), 0, 0)
            finally:
                os.close(root_fd)
        move_to_trash(self._paths, sandbox.state_dir)

    def refill(self, sizes: Sequence[DiskLimits], *, at_most: int) -> int:
        return 0

    def close(self) -> None:
        return None


def has_project_quota(directory: Path) -> bool:
    """Whether a limit can be set on a project there, by setting and removing one."""
    fd = _open(directory)
    try:
        project = _free_project(fd, f"probe of {directory}")
        _set_quota(fd, project, 1, 1)
        _set_quota(fd, project, 0, 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _free_project(fd: int, name: str) -> int:
    """A number derived from the name that no files and no limits belong to."""
    for attempt in range(_ATTEMPTS):
        digest = hashlib.blake2b(f"{name}#{attempt}".encode(), digest_size=4).digest()
        project = int.from_bytes(digest) >> 1 or 1  # 0 is everybody's
        if _get_quota(fd, project).unused:
            return project
    raise OSError(errno.EAGAIN, f"no free quota project in {_ATTEMPTS} attempts", name)


def _get_quota(fd: int, project: int) -> _Quota:
    record = bytearray(_DQBLK.size)
    try:
        syscall.quotactl_fd(fd, _GET_QUOTA, project, record)
    except FileNotFoundError:  # xfs has no record of a project it has never seen
        return _Quota(0, 0, 0, 0)
    hard, _, used, files, _, used_files, *_ = _DQBLK.unpack(record)
    return _Quota(hard * _KIB, used, files, used_files)


def _set_limits(fd: int, project: int, limits: DiskLimits) -> None:
    _set_quota(fd, project, limits.size_mib * _KIB, limits.files)


def _set_quota(fd: int, project: int, size_kib: int, files: int) -> None:
    limits = (size_kib, size_kib, 0, files, files, 0, 0, 0, _LIMITS_VALID)
    syscall.quotactl_fd(fd, _SET_QUOTA, project, bytearray(_DQBLK.pack(*limits)))


def _project_of(fd: int) -> int:
    record = bytearray(_FSXATTR.size)
    fcntl.ioctl(fd, _FS_IOC_FSGETXATTR, record)
    return int(_FSXATTR.unpack(record)[3])


def _set_project(fd: int, project: int) -> None:
    record = bytearray(_FSXATTR.size)
    fcntl.ioctl(fd, _FS_IOC_FSGETXATTR, record)
    flags, extent, _, _, cow = _FSXATTR.unpack(record)
    record[:] = _FSXATTR.pack(flags | _PROJECT_INHERIT, extent, 0, project, cow)
    fcntl.ioctl(fd, _FS_IOC_FSSETXATTR, record)
