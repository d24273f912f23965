"""Callbacks that a caller may write as a plain function or as a coroutine function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

Callback = Callable[[T], Awaitable[None] | None]


async def notify(callback: Callback[T] | None, value: T) -> None:
    """Call it and wait for it; what it raises is the caller's own and passes through."""
    if callback is not None:
        outcome = callback(value)
        if inspect.isawaitable(outcome):
            await outcome
