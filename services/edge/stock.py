"""Keeps ready what a start would otherwise wait for, and empties the trash that stops leave.

Disks are prepared in the sizes that were wanted last, links as they are. One pass at a time, each
in a thread of its own, so that a start never queues behind it; a few disks at a time and none while
starts queue, so that a burst has the processors to itself.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

import structlog

from libdsec.wire import defaults as d
from libdsec.wire.sandbox import Resources
from libhost.aio import HostThreads
from libhost.disk import DiskLimits, empty_trash
from libhost.errors import HostError

from .node import Node

_log = structlog.get_logger("edge.stock")

_SIZES_KEPT: Final = 3
_IDLE_S: Final = 5.0
_PACE_S: Final = 0.05
_DISKS: Final = 4  # at a time, as below
_TRASH_FILES: Final = 500  # at a time, then others get their turn
_PASS_TIMEOUT_S: Final = 60.0


class Stock:
    """wanted() at every start; run() refills and cleans."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._thread = HostThreads(1)
        self._stir = asyncio.Event()
        default = DiskLimits(size_mib=d.DISK_MIB, max_files=d.MAX_FILES)
        self._sizes: OrderedDict[DiskLimits, None] = OrderedDict({default: None})

    def wanted(self, resources: Resources) -> None:
        limits = DiskLimits(size_mib=resources.disk_mib, max_files=resources.max_files)
        self._sizes[limits] = None
        self._sizes.move_to_end(limits)
        while len(self._sizes) > _SIZES_KEPT:
            self._sizes.popitem(last=False)
        self._stir.set()

    async def run(self) -> None:
        while True:
            self._stir.clear()
            deleted = await self._pass()
            if deleted >= _TRASH_FILES:
                await self._node.clock.sleep(_PACE_S)
                continue
            try:
                async with asyncio.timeout(_IDLE_S):
                    await self._stir.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        self._thread.close()

    async def _pass(self) -> int:
        host, sizes = self._node.host, tuple(reversed(self._sizes))
        try:
            await self._refill_disks(sizes)
            if host.network is not None:
                await self._thread.run(_PASS_TIMEOUT_S, host.network.refill)
            return await self._thread.run(
                _PASS_TIMEOUT_S, empty_trash, host.paths, budget_files=_TRASH_FILES
            )
        except (OSError, HostError, TimeoutError) as err:
            # Starts make their own then, and their errors reach somebody.
            _log.warning("stock not refilled", error=repr(err))
            return 0

    async def _refill_disks(self, sizes: tuple[DiskLimits, ...]) -> None:
        refill, made = self._node.host.disk.refill, _DISKS
        while made == _DISKS:
            while self._node.starts.locked():  # one that finds no disk makes its own
                await self._node.clock.sleep(_PACE_S)
            made = await self._thread.run(_PASS_TIMEOUT_S, refill, sizes, at_most=_DISKS)
