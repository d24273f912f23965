"""A process stays itself: by identity across restarts, and how it ended is known to strangers."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from libhost import command, pidfd


@pytest.fixture
def sleeper() -> int:
    return command.spawn(["sleep", "30"])


def test_identity_opens_the_same_process_only(sleeper: int) -> None:
    identity = pidfd.identify(sleeper)
    fd = pidfd.open_process(identity)
    assert pidfd.is_alive(fd)
    with pytest.raises(ProcessLookupError, match="another process"):
        pidfd.open_process(dataclasses.replace(identity, start_ticks=identity.start_ticks - 1))
    pidfd.kill(fd)
    pidfd.wait(fd, timeout_s=5)
    assert not pidfd.is_alive(fd)
    os.waitpid(sleeper, 0)
    pidfd.kill(fd)  # once more is no error
    with pytest.raises(ProcessLookupError):
        pidfd.open_process(identity)
    os.close(fd)


def test_wait_is_bounded(sleeper: int) -> None:
    fd = os.pidfd_open(sleeper)
    with pytest.raises(TimeoutError):
        pidfd.wait(fd, timeout_s=0.05)
    pidfd.kill(fd)
    os.waitpid(sleeper, 0)
    os.close(fd)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 7", pidfd.ExitStatus(7, None)),
        ("exit 0", pidfd.ExitStatus(0, None)),
        ("kill -KILL $$", pidfd.ExitStatus(None, signal.SIGKILL)),
    ],
)
def test_zombie_tells_how_it_ended(script: str, status: pidfd.ExitStatus) -> None:
    """Before its parent reaps it; afterwards is up to the kernel, and tested with the probe."""
    pid = command.spawn(["sh", "-c", script])
    fd = os.pidfd_open(pid)
    pidfd.wait(fd, timeout_s=5)
    assert pidfd.exit_status(fd) == status
    os.waitpid(pid, 0)
    os.close(fd)
