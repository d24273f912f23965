"""Tasks as /proc shows them: which of them cannot be stopped right now.

A cgroup is frozen when each of its tasks has come to a stop, and a task that waits inside the
kernel for a disk or a file server comes to none before it is answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_UNINTERRUPTIBLE = "D"


@dataclass(frozen=True)
class BlockedTask:
    """``waits_in`` is the kernel function it sleeps in, "" where the kernel does not say."""

    pid: int
    tid: int
    name: str
    waits_in: str

    def describe(self) -> str:
        where = f" in {self.waits_in}" if self.waits_in else ""
        return f"process {self.pid} ({self.name}) waits{where}"


def blocked_tasks(pids: Iterable[int]) -> list[BlockedTask]:
    """The threads of these processes that are in uninterruptible sleep; gone ones are left out."""
    found: list[BlockedTask] = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += _blocked(pid, task)
    return found


def _blocked(pid: int, task: Path) -> list[BlockedTask]:
    try:
        # The name stands in parentheses and may itself contain anything.
        head, _, rest = (task / "stat").read_text(errors="replace").rpartition(")")
        waits_in = (task / "wchan").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    if rest.split()[0] != _UNINTERRUPTIBLE:
        return []
    name = head.partition("(")[2]
    return [BlockedTask(pid, int(task.name), name, waits_in if waits_in != "0" else "")]
