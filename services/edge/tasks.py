"""The edge's own tasks: owned, named, and outside of any request's budget.

A task that fails unexpectedly is logged and counted, never lost; at the drain the edge waits for
what runs and then cancels. Work that outlives the handler it was begun in belongs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from libdsec.bus import leave_call
from libdsec.errors import DSecError

T = TypeVar("T")

_log = structlog.get_logger("edge.tasks")


class Tasks:
    """spawn any number -> close."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._waiters: set[asyncio.Task[Any]] = set()
        self.failed = 0

    def spawn(
        self, work: Coroutine[Any, Any, T], *, name: str, waits: bool = False
    ) -> asyncio.Task[T]:
        """`waits`: it only waits for something outside, so that closing need not wait for it."""
        task = asyncio.get_running_loop().create_task(_detached(work), name=name)
        self._running.add(task)
        if waits:
            self._waiters.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, *, timeout_s: float) -> None:
        """Wait for what runs, cancel the rest, wait for that too."""
        for task in self._waiters:
            task.cancel()
        if self._running:
            _, late = await asyncio.wait(tuple(self._running), timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=timeout_s)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._waiters.discard(task)
        if task.cancelled() or (err := task.exception()) is None:
            return
        if not isinstance(err, DSecError):  # those are answers, for whoever awaits the task
            self.failed += 1
            _log.error("task failed", task=task.get_name(), exc_info=err)


async def _detached(work: Coroutine[Any, Any, T]) -> T:
    leave_call()  # keeps the trace, drops the budget
    return await work
