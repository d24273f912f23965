"""The system calls a sandbox may not make, as the BPF program the kernel runs.

Written out here instead of handed to libseccomp by name, for three reasons. libseccomp knows only
the calls of its own release, and what it does not know it leaves allowed; its plain comparisons are
of 64 bits where the kernel uses 32, so a number with high bits set walks past; and compiling the
profile would be paid for at every create. :func:`decide` states the rules, :func:`compile_filter`
says the same to the kernel; a test holds one against the other.

The rules are a deny list with an end: a call newer than the newest one judged here is answered
ENOSYS, as is a call through another ABI (i386, x32).
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from libhost.errors import UnsupportedError

AUDIT_ARCH_X86_64: Final = 0xC000003E
NEWEST_JUDGED: Final = 469  # file_setattr, of Linux 6.17

_NEW_NAMESPACE: Final = 0x7E02_0000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
_NEW_TIME: Final = 0x80  # only unshare takes it: for clone these bits are the exit signal

# Always refused. x86-64 numbers.
_DENIED: Final = {
    # Mounts, roots, other namespaces. CAP_SYS_ADMIN is missing too; two locks on this door.
    "mount": 165, "umount2": 166, "pivot_root": 155, "setns": 308, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "open_tree_attr": 467,
    # The machine itself.
    "reboot": 169, "swapon": 167, "swapoff": 168, "iopl": 172, "ioperm": 173, "acct": 163,
    "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305, "syslog": 103,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246,
    "kexec_file_load": 320, "quotactl": 179, "quotactl_fd": 443, "vhangup": 153,
    "nfsservctl": 180, "lookup_dcookie": 212, "uselib": 134, "ustat": 136, "sysfs": 139,
    # Large kernel surface that tools and tests hardly ever need.
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "fanotify_init": 300,
    # Keys are not namespaced.
    "add_key": 248, "request_key": 249, "keyctl": 250,
    # Reaches files by inode, past every path rule.
    "open_by_handle_at": 304,
    # Changes a file's quota project.
    "file_setattr": 469,
}  # fmt: skip

# Answered as if the kernel did not have them, so that callers fall back.
_ABSENT: Final = {
    # Its flags are behind a pointer, where a filter cannot see a new user namespace.
    "clone3": 435,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
}  # fmt: skip

_CLONE: Final = 56
_UNSHARE: Final = 272
_SOCKET: Final = 41
_SOCKETPAIR: Final = 53
_IOCTL: Final = 16
_PRCTL: Final = 157

# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK.
_FAMILIES: Final = (1, 2, 10, 16)
_AF_PACKET: Final = 17
_PR_SCHED_CORE: Final = 62

# By (type, number), whatever direction and size are encoded in the upper half.
_IOCTLS: Final = {
    0x5820: errno.EPERM,  # FS_IOC_FSSETXATTR: quota project
    0x6602: errno.EOPNOTSUPP,  # FS_IOC_SETFLAGS: clearing project inheritance escapes the quota
    0x586D: errno.EPERM,  # XFS_IOC_SWAPEXT
    0x5881: errno.EPERM,  # XFS_IOC_EXCHANGE_RANGE
    0x5882: errno.EPERM,  # XFS_IOC_START_COMMIT
    0x5883: errno.EPERM,  # XFS_IOC_COMMIT_RANGE
    0x5412: errno.EPERM,  # TIOCSTI: types into the caller's terminal
    0x541C: errno.EPERM,  # TIOCLINUX: the same, by pasting
}


def decide(arch: int, number: int, args: tuple[int, ...]) -> int:
    """0 to allow, else the errno; what :func:`compile_filter` encodes, in plain words."""
    low = tuple(arg & 0xFFFF_FFFF for arg in args)
    if arch != AUDIT_ARCH_X86_64 or number > NEWEST_JUDGED or number in _ABSENT.values():
        return errno.ENOSYS
    if number in _DENIED.values():
        return errno.EPERM
    if number == _CLONE:
        return errno.EPERM if low[0] & _NEW_NAMESPACE else 0
    if number == _UNSHARE:
        return errno.EPERM if low[0] & (_NEW_NAMESPACE | _NEW_TIME) else 0
    if number in (_SOCKET, _SOCKETPAIR) and low[0] not in _FAMILIES:
        return errno.EPERM if low[0] == _AF_PACKET else errno.EAFNOSUPPORT
    if number == _IOCTL:
        return _IOCTLS.get(low[1] & 0xFFFF, 0)
    if number == _PRCTL and low[0] == _PR_SCHED_CORE:
        return errno.EINVAL
    return 0


@dataclass(frozen=True)
class _Op:
    """One instruction of classic BPF."""

    code: int
    k: int
    jump_true: int = 0
    jump_false: int = 0


# linux/bpf_common.h: BPF_LD|BPF_W|BPF_ABS, BPF_JMP|{JEQ,JGT,JSET}|BPF_K, BPF_ALU|BPF_AND, BPF_RET.
_LD, _JEQ, _JGT, _JSET, _AND, _RET = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
_RET_ALLOW: Final = 0x7FFF_0000
_RET_ERRNO: Final = 0x0005_0000
# struct seccomp_data: nr, arch, instruction pointer, six 64-bit arguments, little endian.
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16


@lru_cache(maxsize=1)
def compile_filter() -> bytes:
    """An array of ``struct sock_filter``."""
    machine = platform.machine()
    if machine != "x86_64":
        raise UnsupportedError("seccomp", f"no table of system calls for {machine}")
    ops = [_Op(_LD, _ARCH_AT), *_unless(_JEQ, AUDIT_ARCH_X86_64, errno.ENOSYS)]
    ops += [_Op(_LD, _NUMBER_AT), *_when(_JGT, NEWEST_JUDGED, errno.ENOSYS)]
    # First the calls whose arguments matter: the kernel remembers the others' constant answer and
    # does not run the program for them.
    ops += _block(_CLONE, 0, _when(_JSET, _NEW_NAMESPACE, errno.EPERM))
    ops += _block(_UNSHARE, 0, _when(_JSET, _NEW_NAMESPACE | _NEW_TIME, errno.EPERM))
    family = [_Op(_JEQ, known, len(_FAMILIES) - i + 2) for i, known in enumerate(_FAMILIES)]
    family += [*_when(_JEQ, _AF_PACKET, errno.EPERM), _refuse(errno.EAFNOSUPPORT)]
    ops += [*_block(_SOCKET, 0, family), *_block(_SOCKETPAIR, 0, family)]
    ioctls = [op for low, error in _IOCTLS.items() for op in _when(_JEQ, low, error)]
    ops += _block(_IOCTL, 1, [_Op(_AND, 0xFFFF), *ioctls])
    ops += _block(_PRCTL, 0, _when(_JEQ, _PR_SCHED_CORE, errno.EINVAL))
    for number in _ABSENT.values():
        ops += _when(_JEQ, number, errno.ENOSYS)
    for number in _DENIED.values():
        ops += _when(_JEQ, number, errno.EPERM)
    ops.append(_Op(_RET, _RET_ALLOW))
    return b"".join(struct.pack("=HBBI", o.code, o.jump_true, o.jump_false, o.k) for o in ops)


def _refuse(error: int) -> _Op:
    return _Op(_RET, _RET_ERRNO | error)


def _when(jump: int, value: int, error: int) -> list[_Op]:
    return [_Op(jump, value, 0, 1), _refuse(error)]


def _unless(jump: int, value: int, error: int) -> list[_Op]:
    return [_Op(jump, value, 1, 0), _refuse(error)]


def _block(number: int, argument: int, body: list[_Op]) -> list[_Op]:
    """For one call: load the lower half of an argument, run ``body``, else allow."""
    inside = [_Op(_LD, _ARGS_AT + 8 * argument), *body, _Op(_RET, _RET_ALLOW)]
    return [_Op(_JEQ, number, 0, len(inside)), *inside]
