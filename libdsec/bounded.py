"""Lists that say what is not in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


class BoundedList(list[T]):
    """A list; `dropped` is how many more there were beyond a limit."""

    def __init__(self, items: Iterable[T] = (), dropped: int = 0) -> None:
        super().__init__(items)
        self.dropped = dropped
