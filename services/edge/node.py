"""What all sandboxes of one node share; put together once, in `__main__`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from libhost.aio import HostThreads
from libhost.overlay import OverlayMode
from libhost.sweep import Host

from ..chassis.clock import Clock
from .fault import Point
from .layers.mounts import LayerMounts
from .peers import PolicyPeer, SnapshotterPeer
from .record import Records

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class StartOptions:
    """What the operator decides about every sandbox."""

    parallel_starts: int
    nameservers: tuple[str, ...] = ()
    step_timeout_s: float = 20.0  # of one blocking step of a start or a stop


@dataclass(frozen=True)
class Node:
    """The parts that hold something for a sandbox, and the means to reach them."""

    name: str
    incarnation: str
    boot_id: str
    host: Host
    overlay: OverlayMode
    threads: HostThreads
    layers: LayerMounts
    policy: PolicyPeer
    snapshotter: SnapshotterPeer
    records: Records
    clock: Clock
    options: StartOptions
    fault: Callable[[Point], None]
    starts: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", asyncio.Semaphore(self.options.parallel_starts))

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A blocking step in a thread. A cancelled caller still waits for the step's end: what is
        released next must not race with it. TimeoutError bounds that as well."""
        step = asyncio.ensure_future(
            self.threads.run(self.options.step_timeout_s, function, *args, **kwargs)
        )
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait({step})
            raise


@asynccontextmanager
async def begun(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Work that goes on beside the block and ends with it, whatever becomes of either."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen: whoever needed it has awaited it


async def together(*branches: Coroutine[None, None, None]) -> None:
    """Run side by side; returns when all have ended, with the first failure if there is one.

    Unlike a TaskGroup it lets the others end by themselves: each is in the middle of acquiring
    something, and knows best when that can be undone.
    """
    outcomes = await asyncio.gather(*branches, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
