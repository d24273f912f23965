"""Verbs on all of a project's sandboxes that carry some labels: every edge answers for its own.

A selection is bounded by its `limit` and by what one message holds; what a bound leaves out is
counted in the answer. One sandbox's failure is that sandbox's line, never the verb's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from libdsec.bus import Call
from libdsec.errors import DeathReason, DSecError
from libdsec.wire.sandbox import Listing, ManyOutcome, SandboxInfo, Selection

from ..chassis.clock import Clock
from .lifecycle import Lifecycle
from .pause import Pauses
from .sandbox import Sandbox
from .table import Table

_AT_ONCE: Final = 16
_LISTING_BYTES: Final = 900_000  # a NATS message holds 1 MiB


class Many:
    """list, pause, resume, stop: by labels, within the subject's project."""

    def __init__(
        self, node: str, table: Table, lifecycle: Lifecycle, pauses: Pauses, clock: Clock
    ) -> None:
        self._node = node
        self._table = table
        self._lifecycle = lifecycle
        self._pauses = pauses
        self._clock = clock

    async def list(self, selection: Selection, call: Call) -> Listing:
        return self._listing(selection, call.project)

    async def list_all(self, selection: Selection, _call: Call) -> Listing:
        """Of every project: an operator's."""
        return self._listing(selection, None)

    async def pause(self, selection: Selection, call: Call) -> ManyOutcome:
        async def one(sandbox: Sandbox) -> None:
            await self._pauses.pause(sandbox, reclaim=True)

        return await self._each(selection, call, one)

    async def resume(self, selection: Selection, call: Call) -> ManyOutcome:
        async def one(sandbox: Sandbox) -> None:
            await self._pauses.resume(sandbox)

        return await self._each(selection, call, one)

    async def stop(self, selection: Selection, call: Call) -> ManyOutcome:
        async def one(sandbox: Sandbox) -> None:
            await self._lifecycle.end(sandbox, DeathReason.STOPPED)

        return await self._each(selection, call, one)

    def _listing(self, selection: Selection, project: str | None) -> Listing:
        found = self._table.select(project, selection.labels)
        shown: list[SandboxInfo] = []
        size = 0
        for sandbox in found[: selection.limit]:
            info = sandbox.info(self._node, self._clock)
            size += len(info.encode())
            if size > _LISTING_BYTES:
                break
            shown.append(info)
        return Listing(node=self._node, sandboxes=tuple(shown), dropped=len(found) - len(shown))

    async def _each(
        self, selection: Selection, call: Call, verb: Callable[[Sandbox], Awaitable[None]]
    ) -> ManyOutcome:
        found = [s for s in self._table.select(call.project, selection.labels) if s.usable]
        chosen = found[: selection.limit]
        dropped = len(found) - len(chosen)
        if selection.dry_run:
            ids = tuple(sandbox.id for sandbox in chosen)
            return ManyOutcome(node=self._node, done=ids, dropped=dropped)
        slots = asyncio.Semaphore(_AT_ONCE)
        failed: dict[str, str] = {}

        async def one(sandbox: Sandbox) -> None:
            async with slots:
                try:
                    await verb(sandbox)
                except DSecError as err:
                    failed[sandbox.id] = f"{err.code}: {err.message}"

        async with asyncio.TaskGroup() as tasks:
            for sandbox in chosen:
                tasks.create_task(one(sandbox))
        done = tuple(s.id for s in chosen if s.id not in failed)
        return ManyOutcome(node=self._node, done=done, failed=failed, dropped=dropped)
