"""The only place that starts a program.

Every child gets an argv list, ``/dev/null`` as standard input, a small fixed environment, no
descriptor it was not given, and a deadline. ``posix_spawn`` is used because it does not copy the
page tables of a large event-loop process and runs no Python between fork and exec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libhost.errors import HostError


@dataclass(frozen=True)
class Completed:
    """What a finished program said; captured streams are cut at their cap."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes


class CommandFailedError(HostError):
    """A program ended with an exit code its caller did not allow."""

    def __init__(self, completed: Completed) -> None:
        self.completed = completed
        super().__init__(completed.argv[0])


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    fds: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
    ok: frozenset[int] = frozenset({0}),
    capture_stdout: bool = False,
) -> Completed:
    """Run to the end; ``fds`` maps the child's descriptor number to one of ours.

    Raises CommandFailedError for an exit code not in ``ok`` and TimeoutError (the child is killed
    and reaped first) after ``timeout_s``.
    """
    raise NotImplementedError


def spawn(
    argv: Sequence[str],
    *,
    fds: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
    output_fd: int | None = None,
) -> int:
    """Start a program and return its pid; the caller waits for it (see :mod:`libhost.pidfd`)."""
    raise NotImplementedError
