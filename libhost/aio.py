"""The one bridge from an event loop to this package's blocking calls."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class HostThreads:
    """A bounded set of threads. A call that times out goes on in its thread and keeps its slot:
    the kernel cannot be told to stop, and a second attempt beside the first would be worse."""

    def __init__(self, limit: int) -> None:
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="host")

    async def run(
        self, timeout_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``function(*args, **kwargs)`` in a thread; TimeoutError after ``timeout_s``.

        The time spent waiting for a free thread counts; a call that has not begun by then never
        does.
        """
        loop = asyncio.get_running_loop()
        call = functools.partial(function, *args, **kwargs)
        async with asyncio.timeout(timeout_s):
            return await loop.run_in_executor(self._threads, call)

    def close(self) -> None:
        """Wait for what is running; new calls are refused."""
        self._threads.shutdown(wait=True, cancel_futures=True)
