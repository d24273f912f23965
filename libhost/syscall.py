"""System calls that Python's standard library lacks, named and ordered as in their man pages.

Owns the only ``ctypes`` of the package (besides ``libhost.bpf``). Each wrapper raises ``OSError``
carrying the path or object it was about, and each says why it is here instead of a library.
No policy: nothing in this module knows what a sandbox is.

Numbers are those of ``include/uapi/asm-generic/unistd.h``; from 424 on they are the same on every
architecture, so only such calls are issued by number. The others go through libc's symbol.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Final, NoReturn

_libc: Final = ctypes.CDLL(None, use_errno=True)

SYS_OPEN_TREE: Final = 428
SYS_MOVE_MOUNT: Final = 429
SYS_FSOPEN: Final = 430
SYS_FSCONFIG: Final = 431
SYS_FSMOUNT: Final = 432
SYS_OPENAT2: Final = 437
SYS_PIDFD_GETFD: Final = 438
SYS_PROCESS_MADVISE: Final = 440
SYS_MOUNT_SETATTR: Final = 442
SYS_QUOTACTL_FD: Final = 443

AT_FDCWD: Final = -100
AT_EMPTY_PATH: Final = 0x1000
AT_RECURSIVE: Final = 0x8000

MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8

OPEN_TREE_CLONE: Final = 1
OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH: Final = 0x4
FSOPEN_CLOEXEC: Final = 1
FSMOUNT_CLOEXEC: Final = 1
FSCONFIG_SET_FLAG: Final = 0
FSCONFIG_SET_STRING: Final = 1
FSCONFIG_SET_FD: Final = 5
FSCONFIG_CMD_CREATE: Final = 6
MOUNT_ATTR_RDONLY: Final = 0x1
MOUNT_ATTR_NOSUID: Final = 0x2
MOUNT_ATTR_NODEV: Final = 0x4
MOUNT_ATTR_NOATIME: Final = 0x10

CLONE_NEWNS: Final = 0x20000
CLONE_NEWNET: Final = 0x40000000

RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
RESOLVE_IN_ROOT: Final = 0x10

MADV_WILLNEED: Final = 3
MADV_PAGEOUT: Final = 21
IOV_MAX: Final = 1024


def _fail(subject: str) -> NoReturn:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), subject)


def _syscall(number: int, subject: str, *args: int | bytes | ctypes.c_void_p | None) -> int:
    """Issue a system call by number; integers are passed as longs so that none is truncated."""
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = int(_libc.syscall(ctypes.c_long(number), *words))
    if result < 0:
        _fail(subject)
    return result


_libc.syscall.restype = ctypes.c_long


# --- mount(2) family: no library in the standard set offers any of it, and mount(8) both forks and
# --- silently puts a loop device under a file-backed image.


def mount(source: str, target: str, fstype: str | None, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    kind = fstype.encode() if fstype is not None else None
    options = data.encode() if data else None
    where = os.fsencode(target)
    if _libc.mount(os.fsencode(source), where, kind, ctypes.c_ulong(flags), options) != 0:
        _fail(target)


def umount2(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    if _libc.umount2(os.fsencode(target), flags) != 0:
        _fail(target)


def fsopen(fstype: str) -> int:
    """fsopen(2): a file system context, closed on exec."""
    return _syscall(SYS_FSOPEN, fstype, fstype.encode(), FSOPEN_CLOEXEC)


def fsconfig_set_flag(fs_fd: int, key: str) -> None:
    """fsconfig(2), FSCONFIG_SET_FLAG."""
    _fsconfig(fs_fd, FSCONFIG_SET_FLAG, key, None, 0)


def fsconfig_set_string(fs_fd: int, key: str, value: str) -> None:
    """fsconfig(2), FSCONFIG_SET_STRING."""
    _fsconfig(fs_fd, FSCONFIG_SET_STRING, key, os.fsencode(value), 0)


def fsconfig_set_fd(fs_fd: int, key: str, value_fd: int) -> None:
    """fsconfig(2), FSCONFIG_SET_FD."""
    _fsconfig(fs_fd, FSCONFIG_SET_FD, key, None, value_fd)


def fsconfig_create(fs_fd: int) -> None:
    """fsconfig(2), FSCONFIG_CMD_CREATE."""
    _fsconfig(fs_fd, FSCONFIG_CMD_CREATE, "", None, 0)


def _fsconfig(fs_fd: int, command: int, key: str, value: bytes | None, aux: int) -> None:
    name = key.encode() if key else None
    words = (fs_fd, command, name, value, aux)
    try:
        _syscall(SYS_FSCONFIG, key or "create", *words)
    except OSError as err:
        # The reason in words is queued on the context; errno alone is nearly always EINVAL.
        log = _fs_log(fs_fd)
        if log:
            raise OSError(err.errno, f"{err.strerror}: {log}", err.filename) from err
        raise


def _fs_log(fs_fd: int) -> str:
    lines: list[str] = []
    while True:
        try:
            line = os.read(fs_fd, 4096)
        except OSError:
            return "; ".join(lines)
        lines.append(line.decode(errors="replace").strip())


def fsmount(fs_fd: int, attributes: int = 0) -> int:
    """fsmount(2): a detached mount, in no mount table until :func:`move_mount`."""
    return _syscall(SYS_FSMOUNT, "fsmount", fs_fd, FSMOUNT_CLOEXEC, attributes)


def move_mount(mount_fd: int, target: str) -> None:
    """move_mount(2) of a detached mount onto a path."""
    path = os.fsencode(target)
    flags = MOVE_MOUNT_F_EMPTY_PATH
    _syscall(SYS_MOVE_MOUNT, target, mount_fd, b"", AT_FDCWD, path, flags)


def open_tree(dir_fd: int, path: str, flags: int = 0) -> int:
    """open_tree(2); with OPEN_TREE_CLONE a detached copy that shares the superblock."""
    subject = path or f"fd {dir_fd}"
    empty = 0 if path else AT_EMPTY_PATH
    bits = flags | empty | OPEN_TREE_CLOEXEC
    return _syscall(SYS_OPEN_TREE, subject, dir_fd, os.fsencode(path), bits)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def mount_setattr(mount_fd: int, attr_set: int, *, recursive: bool = False) -> None:
    """mount_setattr(2) on a mount given by descriptor."""
    attr = _MountAttr(attr_set, 0, 0, 0)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    pointer = ctypes.cast(ctypes.pointer(attr), ctypes.c_void_p)
    size = ctypes.sizeof(attr)
    _syscall(SYS_MOUNT_SETATTR, f"fd {mount_fd}", mount_fd, b"", flags, pointer, size)


# --- namespaces: os.unshare and os.setns arrive only with Python 3.12.


def unshare(flags: int) -> None:
    """unshare(2): acts on the calling thread."""
    if _libc.unshare(ctypes.c_int(flags)) != 0:
        _fail(f"unshare {flags:#x}")


def setns(fd: int, nstype: int) -> None:
    """setns(2): acts on the calling thread; CLONE_NEWNS needs a process of one thread."""
    if _libc.setns(ctypes.c_int(fd), ctypes.c_int(nstype)) != 0:
        _fail(f"setns fd {fd}")


# --- path resolution inside somebody else's root: os.open follows what the sandbox planted.


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def openat2(dir_fd: int, path: str, flags: int, mode: int = 0, resolve: int = 0) -> int:
    """openat2(2); the descriptor is closed on exec."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    pointer = ctypes.cast(ctypes.pointer(how), ctypes.c_void_p)
    return _syscall(SYS_OPENAT2, path, dir_fd, os.fsencode(path), pointer, ctypes.sizeof(how))


# --- processes by descriptor: pidfd_open and pidfd_send_signal are in the standard library.


def pidfd_getfd(pidfd: int, target_fd: int) -> int:
    """pidfd_getfd(2)."""
    return _syscall(SYS_PIDFD_GETFD, f"fd {target_fd} of pidfd", pidfd, target_fd, 0)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def process_madvise(pidfd: int, ranges: Sequence[tuple[int, int]], advice: int) -> int:
    """process_madvise(2) over ``(address, length)`` ranges; returns the bytes it advised.

    It may stop short; the caller goes on behind the returned count. At most IOV_MAX ranges.
    """
    vector = (_IoVec * len(ranges))(*(_IoVec(base, length) for base, length in ranges))
    pointer = ctypes.cast(vector, ctypes.c_void_p)
    count = len(ranges)
    return _syscall(SYS_PROCESS_MADVISE, "process_madvise", pidfd, pointer, count, advice, 0)


# --- quotas and scheduling


def quotactl_fd(fd: int, command: int, identity: int, record: bytearray) -> None:
    """quotactl_fd(2); ``record`` is the packed structure the command reads or fills."""
    buffer = (ctypes.c_char * len(record)).from_buffer(record)
    pointer = ctypes.cast(buffer, ctypes.c_void_p)
    _syscall(SYS_QUOTACTL_FD, f"quotactl {command:#x}", fd, command, identity, pointer)


def prctl(option: int, arg2: int = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    """prctl(2)."""
    words = [ctypes.c_ulong(a) for a in (arg2, arg3, arg4, arg5)]
    result = int(_libc.prctl(ctypes.c_int(option), *words))
    if result < 0:
        _fail(f"prctl {option}")
    return result
