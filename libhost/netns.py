"""Network namespaces held by descriptor, and code that runs inside one.

A namespace is the state of a thread. Each piece of work inside one therefore gets a thread of its
own that ends with it: a thread that is reused would carry the namespace to the next caller.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from libhost import syscall

T = TypeVar("T")


def create_with(function: Callable[[], T]) -> tuple[int, T]:
    """Run ``function`` inside a new namespace; returns the namespace's descriptor and the result.

    If it raises, the namespace is gone with whatever was put into it.
    """

    def inside() -> tuple[int, T]:
        syscall.unshare(syscall.CLONE_NEWNET)
        fd = open_current()
        try:
            return fd, function()
        except BaseException:
            os.close(fd)
            raise

    return _Errand(inside).result()


def run_inside(namespace_fd: int, function: Callable[[], T]) -> T:
    """Run ``function`` inside an existing namespace."""

    def inside() -> T:
        syscall.setns(namespace_fd, syscall.CLONE_NEWNET)
        return function()

    return _Errand(inside).result()


def open_current() -> int:
    """Descriptor of the calling thread's namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


class _Errand(Generic[T]):
    """A thread with one job, whose outcome its maker waits for."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._results: list[T] = []
        self._error: BaseException | None = None

    def result(self) -> T:
        thread = threading.Thread(target=self._run, name="netns")
        thread.start()
        thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as err:
            self._error = err
