"""The only place that starts a program.

Every child gets an argv list, ``/dev/null`` as standard input, a small fixed environment, its own
session, no descriptor it was not given, and a deadline. ``posix_spawn`` is used because it does
not copy the page tables of a large event-loop process and runs no Python between fork and exec.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libhost.errors import HostError

# Enough of a stream to explain a failure, or to hold the small answers that are asked for.
CAPTURE_MAX_BYTES = 1 << 20
_TAIL_BYTES = 2000
_ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
# Python ignores these; a child that inherits the ignoring would not end on a closed pipe.
_RESET_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)


@dataclass(frozen=True)
class Completed:
    """What a finished program said; of each captured stream the first CAPTURE_MAX_BYTES."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes


class CommandFailedError(HostError):
    """A program ended with an exit code its caller did not allow (negative: by that signal)."""

    def __init__(self, completed: Completed) -> None:
        self.completed = completed
        said = completed.stderr[-_TAIL_BYTES:].decode(errors="replace").strip()
        super().__init__(
            f"`{shlex.join(completed.argv)}` exited with {completed.exit_code}: {said or 'silent'}"
        )


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    fds: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
    ok: frozenset[int] = frozenset({0}),
    log: Path | None = None,
) -> Completed:
    """Run to the end; ``fds`` maps the child's descriptor number to one of ours.

    Output is captured through pipes, or with ``log`` as :func:`begin` does it.
    Raises CommandFailedError for an exit code not in ``ok`` and TimeoutError (the child is killed
    and reaped first) after ``timeout_s``.
    """
    if log is not None:
        return finish(begin(argv, log=log, fds=fds, env=env), timeout_s=timeout_s, ok=ok)
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        (out, out_sink), (err, err_sink) = _pipe(stack), _pipe(stack)
        pid = _posix_spawn(argv, {**(fds or {}), 1: out_sink, 2: err_sink}, env)
        stdout, stderr = _collect(argv, pid, [out, err], deadline)
    return _checked(Completed(tuple(argv), _reap(pid), stdout, stderr), ok)


@dataclass(frozen=True)
class Child:
    """A program that runs: begin -> finish."""

    argv: tuple[str, ...]
    pid: int
    log: Path


def begin(
    argv: Sequence[str],
    *,
    log: Path,
    fds: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
) -> Child:
    """Start a program whose output is appended to a file: one that leaves a descendant behind would
    leave it a pipe too, and the reading would never end."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        pid = _posix_spawn(argv, {**(fds or {}), 1: sink, 2: sink}, env)
    finally:
        os.close(sink)
    return Child(tuple(argv), pid, log)


def finish(child: Child, *, timeout_s: float, ok: frozenset[int] = frozenset({0})) -> Completed:
    """Wait for its end; raises as :func:`run` does, and as there the child is reaped."""
    _collect(child.argv, child.pid, [], time.monotonic() + timeout_s)
    exit_code = _reap(child.pid)
    said = child.log.read_bytes() if exit_code not in ok else b""
    return _checked(Completed(child.argv, exit_code, b"", said), ok)


def spawn(
    argv: Sequence[str],
    *,
    fds: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
    output_fd: int | None = None,
) -> int:
    """Start a program and return its pid; the caller waits for it (see :mod:`libhost.pidfd`)."""
    with contextlib.ExitStack() as stack:
        sink = output_fd
        if sink is None:
            sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, sink)
        return _posix_spawn(argv, {**(fds or {}), 1: sink, 2: sink}, env)


def _reap(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _checked(completed: Completed, ok: frozenset[int]) -> Completed:
    if completed.exit_code not in ok:
        raise CommandFailedError(completed)
    return completed


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reading, False)
    stack.callback(os.close, reading)
    stack.callback(os.close, writing)
    return reading, writing


def _collect(argv: Sequence[str], pid: int, streams: Sequence[int], deadline: float) -> list[bytes]:
    """Read until the child has exited; what descendants write afterwards is not waited for."""
    chunks = {fd: bytearray() for fd in streams}
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        for fd in (pidfd, *streams):
            poll.register(fd, select.POLLIN)
        exited = False
        while not exited:
            left_s = deadline - time.monotonic()
            ready = poll.poll(left_s * 1000) if left_s > 0 else []
            if not ready:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise TimeoutError(f"`{shlex.join(argv)}` did not end in time")
            exited = any(fd == pidfd for fd, _ in ready)
            for fd, chunk in chunks.items():
                _drain(fd, chunk)
    finally:
        os.close(pidfd)
    return [bytes(chunk) for chunk in chunks.values()]


def _drain(fd: int, into: bytearray) -> None:
    """Take what is there now. We hold the other end too, so there is no end of the stream."""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(fd, 65536):
            into += data[: max(0, CAPTURE_MAX_BYTES - len(into))]


def _posix_spawn(argv: Sequence[str], fds: Mapping[int, int], env: Mapping[str, str] | None) -> int:
    with _disjoint(fds) as sources:
        actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
        ]
        actions += [(os.POSIX_SPAWN_DUP2, source, target) for target, source in sources.items()]
        try:
            return os.posix_spawnp(
                argv[0],
                list(argv),
                {**_ENVIRONMENT, **(env or {})},
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=_RESET_SIGNALS,
            )
        except OSError as err:
            raise OSError(err.errno, err.strerror, argv[0]) from err


@contextlib.contextmanager
def _disjoint(fds: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """The same mapping with no source among the targets, so that no dup2 destroys a later source.

    dup2 of a descriptor onto itself would besides leave it closed on exec.
    """
    floor = max(fds, default=0) + 1
    copies: list[int] = []
    try:
        sources: dict[int, int] = {}
        for target, source in fds.items():
            if source in fds:
                source = fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, floor)
                copies.append(source)
            sources[target] = source
        yield sources
    finally:
        for fd in copies:
            os.close(fd)
