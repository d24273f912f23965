"""One supervised process: started, found ready, restarted when it dies, adopted after a crash.

Lifecycle: `start()` or `adopt()` -> `await ready()` -> `await exited()` -> (again) -> `stop()`.

A process is known by (pid, start time), never by pid alone, and watched through a pidfd, so that a
supervisor that was killed finds its processes again and two supervisors cannot confuse them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from libhost import command, pidfd

from .probe_ready import Ready, is_ready

_LOG_CAP_BYTES = 32 << 20
_LAST_WORDS_BYTES = 400


@dataclass(frozen=True)
class ProcessSpec:
    """What to run, and how to tell that it serves."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready: Ready
    log: Path
    stop_timeout_s: float = 30.0
    stop_signal: int = signal.SIGTERM


class Process:
    """A running (or dead) instance of a spec."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.identity: pidfd.ProcessIdentity | None = None
        self._fd: int | None = None

    def start(self, extra_env: Mapping[str, str] | None = None) -> None:
        fd = os.open(self.spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            env = {**self.spec.env, **(extra_env or {})}
            pid = command.spawn(self.spec.argv, env=env, output_fd=fd)
        finally:
            os.close(fd)
        self.adopt(pidfd.identify(pid))

    def adopt(self, identity: pidfd.ProcessIdentity) -> None:
        """Take over a process that runs already.

        Raises:
            ProcessLookupError: it does not.
        """
        fd = pidfd.open_process(identity)
        self.close()
        self.identity, self._fd = identity, fd

    @property
    def pid(self) -> int | None:
        return self.identity.pid if self.identity else None

    @property
    def alive(self) -> bool:
        return self._fd is not None and pidfd.is_alive(self._fd)

    async def ready(self, timeout_s: float) -> bool:
        """Whether it answered as ready in time; False at once when it died."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while self.alive and loop.time() < end:
            if await is_ready(self.spec.ready):
                return True
            await asyncio.sleep(0.05)
        return False

    async def exited(self) -> None:
        """Return when the process has ended, and reap it if it is our child."""
        if self._fd is None:
            return
        loop = asyncio.get_running_loop()
        gone = loop.create_future()
        fd = self._fd

        def ended() -> None:
            if not gone.done():
                gone.set_result(None)

        loop.add_reader(fd, ended)
        try:
            await gone
        finally:
            loop.remove_reader(fd)
        self._reap()

    async def stop(self) -> bool:
        """Signal, wait, kill; True if it ended by itself in time."""
        if not self.alive or self._fd is None:
            self._reap()
            return True
        pidfd.kill(self._fd, self.spec.stop_signal)
        try:
            await asyncio.wait_for(self.exited(), self.spec.stop_timeout_s)
        except TimeoutError:
            pidfd.kill(self._fd, signal.SIGKILL)
            await asyncio.wait_for(self.exited(), 10)
            return False
        finally:
            self.close()
        return True

    def cap_log(self) -> None:
        """Keep the log below its cap: the old half goes to `<log>.1`, which it replaces."""
        log = self.spec.log
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > _LOG_CAP_BYTES:
                log.with_suffix(".log.1").write_bytes(log.read_bytes())
                os.truncate(log, 0)  # the writer appends, so it goes on at the new end

    def last_words(self) -> str:
        """The end of its log, for a person; "" when it has said nothing."""
        with contextlib.suppress(FileNotFoundError), self.spec.log.open("rb") as log:
            log.seek(max(0, self.spec.log.stat().st_size - _LAST_WORDS_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _reap(self) -> None:
        if self.identity is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.identity.pid, os.WNOHANG)
