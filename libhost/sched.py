"""Keeping best-effort work off a latency-sensitive task's core (core scheduling).

A cookie is a property of a task that its children inherit; tasks of different cookies never run on
one core at the same time. Each call works from a thread of its own, because what it does, it does
to itself first.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence

from libhost import syscall
from libhost.errors import UnsupportedError

_PR_SCHED_CORE = 62
_GET, _CREATE, _SHARE_TO, _SHARE_FROM = 0, 1, 2, 3
_THREAD, _THREAD_GROUP = 0, 1


def new_cookie(process_ids: Sequence[int]) -> None:
    """Give these processes one fresh core-scheduling cookie; UnsupportedError where absent."""

    def hand_out() -> None:
        _core(_CREATE, 0, _THREAD)
        for pid in process_ids:
            _core(_SHARE_TO, pid, _THREAD_GROUP)

    _in_own_thread(hand_out)


def share_cookie(leader_pid: int, process_ids: Sequence[int]) -> None:
    """Give these processes the cookie of ``leader_pid``."""

    def hand_on() -> None:
        _core(_SHARE_FROM, leader_pid, _THREAD)
        for pid in process_ids:
            _core(_SHARE_TO, pid, _THREAD_GROUP)

    _in_own_thread(hand_on)


def _core(operation: int, pid: int, scope: int) -> None:
    try:
        syscall.prctl(_PR_SCHED_CORE, operation, pid, scope)
    except OSError as err:
        if err.errno in (errno.EINVAL, errno.ENODEV):
            reason = "the kernel has no core scheduling" if err.errno == errno.EINVAL else "no SMT"
            raise UnsupportedError("core scheduling", reason) from err
        raise


def _in_own_thread(job: Callable[[], None]) -> None:
    """So that the cookie goes with the thread and the caller keeps none."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            job()
        except BaseException as err:
            errors.append(err)

    thread = threading.Thread(target=run, name="core-cookie")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
