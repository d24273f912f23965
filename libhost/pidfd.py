"""A process that stays the same process: a pidfd, and (pid, start time) where it is written down.

A pid alone is reused; a pidfd cannot outlive its holder. What is journalled is therefore the pair,
and :func:`open_process` turns it back into a pidfd or says that the process is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

# struct pidfd_info, first published size: mask, cgroupid, eleven ids, exit_code (linux/pidfd.h).
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3


@dataclass(frozen=True)
class ProcessIdentity:
    """``start_ticks``: field 22 of /proc/<pid>/stat, unchanged for the life of the process."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class ExitStatus:
    """``code`` or ``signal`` is set; both None: the kernel no longer knows (older than 6.15)."""

    code: int | None
    signal: int | None


def identify(pid: int) -> ProcessIdentity:
    """Raises ProcessLookupError if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError) as err:
        raise ProcessLookupError(errno.ESRCH, "no such process", str(pid)) from err
    # The name in field 2 may hold spaces and parentheses; what follows its last one is plain.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return ProcessIdentity(pid, int(fields[19]))


def open_process(identity: ProcessIdentity) -> int:
    """A pidfd of exactly that process; raises ProcessLookupError if it is gone."""
    pidfd = os.pidfd_open(identity.pid)
    try:
        # Read after the open: from here on the pid cannot be given to anyone else.
        if identify(identity.pid) == identity:
            return pidfd
    except ProcessLookupError:
        os.close(pidfd)
        raise
    os.close(pidfd)
    raise ProcessLookupError(errno.ESRCH, "the pid belongs to another process", str(identity.pid))


def wait(pidfd: int, *, timeout_s: float) -> None:
    """Until it has exited; TimeoutError. Event loops add the pidfd to their readers instead."""
    if not _poll(pidfd, select.POLLIN, timeout_s):
        raise TimeoutError(f"the process did not exit within {timeout_s} s")


def is_alive(pidfd: int) -> bool:
    return not _poll(pidfd, select.POLLIN, 0)


def kill(pidfd: int, signal_number: int = signal.SIGKILL) -> None:
    """Idempotent: no error if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal_number)


def exit_status(pidfd: int, *, timeout_s: float = 1.0) -> ExitStatus:
    """How an exited process ended, also one that is not our child.

    The kernel tells once the parent has reaped it, which hangs up the pidfd; ``timeout_s`` bounds
    the wait for a parent that is slow.
    """
    _poll(pidfd, 0, timeout_s)
    record = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, record)
    except OSError as err:
        if err.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH):
            return ExitStatus(None, None)
        raise
    mask, *_, status = _PIDFD_INFO.unpack(record)
    if not mask & _PIDFD_INFO_EXIT:
        return ExitStatus(None, None)
    code = os.waitstatus_to_exitcode(status)
    return ExitStatus(code, None) if code >= 0 else ExitStatus(None, -code)


def _poll(pidfd: int, events: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, events)
    return bool(poll.poll(timeout_s * 1000))
