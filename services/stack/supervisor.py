"""Keeps a stack's processes running, and takes them away in order.

Owns no state of DSec's: killing it hurts nothing, the next one adopts the processes it finds in
`run/processes.json`. It is commanded through a unix socket with one JSON line in ("up", "down",
"status"), and JSON lines out until one says `done`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from libhost import pidfd

from .files import write_private
from .layout import StackPaths
from .probe_ready import HttpReady, why_not_ready
from .process import Process, ProcessSpec

_RESTART_MIN_S, _RESTART_MAX_S = 0.2, 5.0
_READY_TIMEOUT_S = 60.0
_LOG_CHECK_S = 10.0


@dataclass
class Stage:
    """Processes that start together, after those of the stage before are ready."""

    name: str
    specs: Sequence[ProcessSpec]
    processes: list[Process] = field(default_factory=list)


class AlreadySupervisedError(Exception):
    """Another supervisor holds this stack."""


class Supervisor:
    """Lifecycle: `hold()` -> `up()` -> (control socket) -> `down()`."""

    def __init__(self, paths: StackPaths) -> None:
        self._paths = paths
        self._stages: list[Stage] = []
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._restarts: dict[str, int] = {}
        self._left: dict[str, pidfd.ProcessIdentity] = {}  # by an earlier supervisor, to be adopted
        self._lock_fd: int | None = None
        self.stopping = False

    def hold(self) -> None:
        """Become the only supervisor of this stack, until the process ends.

        Raises:
            AlreadySupervisedError: somebody else is.
        """
        fd = os.open(self._paths.run / "stack.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            os.close(fd)
            raise AlreadySupervisedError(str(self._paths.home)) from err
        self._lock_fd = fd
        self._left = self._recorded()

    async def up(self, stage: Stage) -> list[str]:
        """Start (or adopt) a stage; returns the names of what did not become ready, and why."""
        self._stages.append(stage)
        for spec in stage.specs:
            process = Process(spec)
            stage.processes.append(process)
            try:
                process.adopt(self._left.pop(spec.name))
            except (KeyError, ProcessLookupError):
                process.start()
            self._watchers[spec.name] = asyncio.create_task(self._keep(process))
        self._record()
        ready = await asyncio.gather(*(p.ready(_READY_TIMEOUT_S) for p in stage.processes))
        return [
            await self._complaint(p) for p, ok in zip(stage.processes, ready, strict=True) if not ok
        ]

    async def down(self) -> list[str]:
        """Stop everything, last stage first; returns the names of what had to be killed."""
        self.stopping = True
        self.adopt_left()
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        killed = []
        for stage in reversed(self._stages):
            clean = await asyncio.gather(*(p.stop() for p in stage.processes))
            killed += [p.spec.name for p, ok in zip(stage.processes, clean, strict=True) if not ok]
        self._paths.processes.unlink(missing_ok=True)
        return killed

    def status(self) -> list[dict[str, object]]:
        return [
            {"name": p.spec.name, "pid": p.pid, "alive": p.alive,
             "restarts": self._restarts.get(p.spec.name, 0), "log": str(p.spec.log)}
            for stage in self._stages for p in stage.processes
        ]  # fmt: skip

    def adopt_left(self) -> int:
        """Take over what an earlier supervisor left, to stop it; returns how many there are."""
        stage = Stage("left behind", ())
        while self._left:
            name, identity = self._left.popitem()
            spec = ProcessSpec(name, (), {}, HttpReady(0, ""), self._paths.log / f"{name}.log")
            process = Process(spec)
            with contextlib.suppress(ProcessLookupError):
                process.adopt(identity)
                stage.processes.append(process)
        self._stages.append(stage)
        return len(stage.processes)

    async def restart(self, name: str, extra_env: Mapping[str, str]) -> None:
        """Stop one process and start it, once with more environment, and wait until it is ready.

        Raises:
            KeyError: there is no such process.
            TimeoutError: it did not become ready.
        """
        process = self._find(name)
        watcher = self._watchers.pop(name)
        watcher.cancel()
        await asyncio.wait({watcher})  # it must have let go of the process's descriptor
        await process.stop()
        process.start(extra_env)
        self._record()
        self._watchers[name] = asyncio.create_task(self._keep(process))
        if not await process.ready(_READY_TIMEOUT_S):
            raise TimeoutError(await self._complaint(process))

    def _find(self, name: str) -> Process:
        found = {p.spec.name: p for stage in self._stages for p in stage.processes}
        if name not in found:
            raise KeyError(f"no process {name!r}; there are {', '.join(found)}")
        return found[name]

    def reload_users(self) -> None:
        """Make the hub read its configuration again: users may have been added.

        Not the leaves: they know no users, and a leaf that reloads its accounts forgets by which
        domain it reaches JetStream.
        """
        hub = self._find("nats-hub")
        if hub.pid:
            os.kill(hub.pid, signal.SIGHUP)

    async def _keep(self, process: Process) -> None:
        """Restart `process` whenever it ends, with a growing pause while it keeps dying young."""
        loop = asyncio.get_running_loop()
        pause = _RESTART_MIN_S
        while True:
            born = loop.time()
            while not await _exits_within(process, _LOG_CHECK_S):
                process.cap_log()
            if loop.time() - born > 10 * _RESTART_MAX_S:
                pause = _RESTART_MIN_S
            await asyncio.sleep(pause)
            pause = min(pause * 2, _RESTART_MAX_S)
            self._restarts[process.spec.name] = self._restarts.get(process.spec.name, 0) + 1
            process.start()
            self._record()

    async def _complaint(self, process: Process) -> str:
        said = await why_not_ready(process.spec.ready) or process.last_words()
        return f"{process.spec.name}: not ready ({said or 'no answer'}); see {process.spec.log}"

    def _record(self) -> None:
        """What still waits to be adopted stays in the record, or a death now would lose it."""
        ours = {p.spec.name: p.identity for stage in self._stages for p in stage.processes}
        running = {
            name: [identity.pid, identity.start_ticks]
            for name, identity in (self._left | ours).items()
            if identity is not None
        }
        write_private(self._paths.processes, json.dumps(running))

    def _recorded(self) -> dict[str, pidfd.ProcessIdentity]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            kept = json.loads(self._paths.processes.read_text())
            return {name: pidfd.ProcessIdentity(*pair) for name, pair in kept.items()}
        return {}


async def _exits_within(process: Process, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await process.exited()
    except TimeoutError:
        return False
    return True
