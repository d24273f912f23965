"""Why a sandbox died: seen by its pidfd, judged from what the kernel and the journal say.

The agent's channel proves nothing either way: it breaks when the edge restarts. PID 1's exit is
the end of its pid namespace, so every process in the sandbox is gone or going with it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass

from libdsec.errors import DeathReason
from libhost.pidfd import ExitStatus


@dataclass(frozen=True)
class Evidence:
    """What is known at the death of a sandbox."""

    ending: DeathReason | None  # we were ending it, for this
    exit: ExitStatus
    oom_kills: int  # of the whole sandbox, ever
    oom_kills_seen: int  # how many of them were commands' own deaths, already told
    same_boot: bool = True


def judge(evidence: Evidence) -> tuple[DeathReason, str]:
    """The reason, and a sentence for whoever is on call."""
    if not evidence.same_boot:
        return DeathReason.NODE_PANIC, "the machine has restarted"
    if evidence.ending is not None:
        return evidence.ending, ""
    code, number = evidence.exit.code, evidence.exit.signal
    if number == signal.SIGKILL and evidence.oom_kills > evidence.oom_kills_seen:
        return DeathReason.OOM, "the kernel killed PID 1 for want of memory"
    if number in {signal.SIGKILL, signal.SIGTERM, signal.SIGINT}:
        return DeathReason.KILLED, f"PID 1 was killed from outside by {signal.Signals(number).name}"
    if number is not None:
        return DeathReason.AGENT, f"the agent died of signal {number}"
    if code is not None:
        return DeathReason.AGENT, f"the agent ended with code {code}"
    if evidence.oom_kills > evidence.oom_kills_seen:
        return DeathReason.OOM, "PID 1 is gone and the kernel has killed for want of memory"
    return DeathReason.KILLED, "PID 1 is gone; how it ended is no longer known"


class ExitWatch:
    """Tells once when the process of a pidfd has exited. open -> then(callback) -> close."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._callback: Callable[[], object] | None = None
        self._watching = True
        self.ended = False
        self._loop.add_reader(pidfd, self._on_exit)

    def then(self, callback: Callable[[], object]) -> None:
        """Call this at the exit, at once if that has been."""
        self._callback = callback
        if self.ended:
            callback()

    def close(self) -> None:
        """Before the pidfd itself is closed; nobody is called any more."""
        self._callback = None
        self._unwatch()

    def _on_exit(self) -> None:
        self._unwatch()
        self.ended = True
        if self._callback is not None:
            self._callback()

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._pidfd)
