"""The one bridge from an event loop to this package's blocking calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class HostThreads:
    """A bounded set of threads. A call that times out goes on in its thread and keeps its slot."""

    def __init__(self, limit: int) -> None:
        raise NotImplementedError

    async def run(
        self, timeout_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``function(*args, **kwargs)`` in a thread; TimeoutError after ``timeout_s``."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for what is running; new calls are refused."""
        raise NotImplementedError
