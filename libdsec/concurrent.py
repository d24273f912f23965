"""Doing one thing for many items, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, limit: int) -> None:
    """Run `work` for every item, at most `limit` at once; the first failure ends the rest.

    Raises:
        Exception: that first failure itself, not a group around it.
    """
    shared = iter(items)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(limit):
                group.create_task(_drain(shared, work))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _drain(shared: Iterator[T], work: Callable[[T], Awaitable[None]]) -> None:
    for item in shared:
        await work(item)
