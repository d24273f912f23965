"""Work that several callers wait for and none of them owns.

A caller that gives up must not cancel what others still wait for, and a failure belongs to those
who wait, not to the process. So the tasks are kept here, are waited for through `asyncio.shield`,
and are given a moment to finish at the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Flights:
    """start (any number) -> close. Bounded by its user, who starts one per thing worked on."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._landed)
        return task

    async def close(self, timeout_s: float) -> None:
        """Wait for what is under way, then cancel it."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(tuple(self._tasks), timeout=timeout_s)
        for task in late:
            _log.warning("gave up after %s s: %s", timeout_s, task.get_name())
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=1.0)

    def _landed(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (err := task.exception()) is not None:
            _log.info("%s: %s", task.get_name(), err)  # also where nobody waits any more
