"""A process that stays the same process: a pidfd, and (pid, start time) where it is written down.

A pid alone is reused; a pidfd cannot outlive its holder. What is journalled is therefore the pair,
and :func:`open_process` turns it back into a pidfd or says that the process is gone.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    raise NotImplementedError


def open_process(identity: ProcessIdentity) -> int:
    """A pidfd of exactly that process; raises ProcessLookupError if it is gone."""
    raise NotImplementedError


def wait(pidfd: int, *, timeout_s: float) -> None:
    """Until it has exited; TimeoutError. Event loops add the pidfd to their readers instead."""
    raise NotImplementedError


def is_alive(pidfd: int) -> bool:
    raise NotImplementedError


def kill(pidfd: int, signal_number: int = 9) -> None:
    """Idempotent: no error if it is gone."""
    raise NotImplementedError


def exit_status(pidfd: int) -> ExitStatus:
    """How it ended, also for a process that is not our child."""
    raise NotImplementedError
