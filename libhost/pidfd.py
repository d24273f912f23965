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
        return ProcessIdentity(pid, int(_stat_fields(pid)[19]))
    except (FileNotFoundError, ProcessLookupError) as err:
        raise ProcessLookupError(errno.ESRCH, "no such process", str(pid)) from err


def _stat_fields(pid: int) -> list[bytes]:
    """/proc/<pid>/stat from field 3 (state) on."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    # The name in field 2 may hold spaces and parentheses; what follows its last one is plain.
    return stat[stat.rindex(b")") + 2 :].split()


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


def exit_status(pidfd: int, *, timeout_s: float = 2.0) -> ExitStatus:
    """How an exited process ended, also one that is not our child.

    The kernel tells it by pidfd once the process has been reaped, and by /proc until then; between
    the two calls it may just have been, hence the second attempt. ``timeout_s`` bounds the wait
    for that.
    """
    status = _status_of_reaped(pidfd)
    if status is None:
        status = _status_of_zombie(pidfd)
    if status is None and _poll(pidfd, 0, timeout_s):  # hung up: reaped
        status = _status_of_reaped(pidfd)
    if status is None:
        return ExitStatus(None, None)
    code = os.waitstatus_to_exitcode(status)
    return ExitStatus(code, None) if code >= 0 else ExitStatus(None, -code)


def _status_of_reaped(pidfd: int) -> int | None:
    record = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, record)
    except OSError as err:
        if err.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH):
            return None
        raise
    mask, *_, status = _PIDFD_INFO.unpack(record)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def _status_of_zombie(pidfd: int) -> int | None:
    """The last field of its stat. fdinfo says -1 instead of the pid once it is reaped."""
    info = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    pid = next(line.split()[1] for line in info if line.startswith("Pid:"))
    try:
        fields = _stat_fields(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[-1]) if fields[0] == b"Z" else None


def _poll(pidfd: int, events: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, events)
    return bool(poll.poll(timeout_s * 1000))
