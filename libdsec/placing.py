"""From a spec to sandboxes: the client's half of the placement protocol.

The request is published into its lane, where it waits; progress and announcements come to an inbox.
Whatever happens to a message on the way, it is repeated under the same key and request id, so that
one request stays one request; a scheduler that knows the key announces again what it placed.

A caller who gives up, by timeout or cancellation, cancels the request. What was placed at that very
moment is still announced, to nobody: the inbox is watched a little longer and such sandboxes are
stopped, so that an error never leaves a sandbox behind.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, suppress

from .bus import Budget, Bus, Inbox, Part
from .callback import Callback, notify
from .connection import Connection
from .errors import DeadlineExceeded, DSecError, PermissionDenied, QuotaExceeded, Unavailable
from .operation import Operation
from .wire.defaults import SUSPECT_AFTER_S
from .wire.ids import sandbox_node
from .wire.model import random_token
from .wire.placement import Announcement, CancelRequest, PlaceRequest, Progress, ReadyItem
from .wire.sandbox import SandboxSpec, StopSandbox
from .wire.subjects import CANCEL, PLACE, STOP, lane_tail

_log = logging.getLogger("libdsec.placing")

KIND_PROGRESS = "progress"
KIND_ANNOUNCE = "announce"

_PUBLISH_S = 5.0
_REPEAT_S = 1.0
_CANCEL_S = 2.0
_LINGER_S = SUSPECT_AFTER_S

Outcome = ReadyItem | DSecError


class Placing:
    """One message of `count` alike sandboxes, from its publish to its last announcement."""

    def __init__(
        self,
        connection: Connection,
        op: Operation,
        spec: SandboxSpec,
        *,
        count: int,
        key: str,
        request_id: str,
        budget: Budget,
        timeout_s: float,
        on_progress: Callback[Progress] | None,
    ) -> None:
        self._connection = connection
        self._op = op
        self._spec = spec
        self._count = count
        self._key = key
        self._request_id = request_id
        self._budget = budget
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._outcomes: dict[int, Outcome] = {}
        self._progress: Progress | None = None

    async def run(self) -> list[Outcome]:
        """What became of each item; an error for all of them is in every place."""
        bus = await self._connection.bus()
        async with AsyncExitStack() as stack:
            inbox = await stack.enter_async_context(bus.inbox(limit=2 * self._count + 256))
            try:
                await self._publish(bus, inbox)
                while self._open:
                    await self._advance(bus, inbox)
            except (QuotaExceeded, PermissionDenied) as err:  # nothing was queued
                self._settle_open(err)
            except DSecError as err:
                keep = self._ready()
                self._settle_open(self._in_words(err))
                self._connection.spawn(self._withdraw(stack.pop_all(), bus, inbox, keep))
            except BaseException:
                # The caller gets nothing at all, so nothing is kept.
                self._connection.spawn(self._withdraw(stack.pop_all(), bus, inbox, frozenset()))
                raise
        return [self._outcomes[index] for index in range(self._count)]

    @property
    def _open(self) -> bool:
        return len(self._outcomes) < self._count

    async def _publish(self, bus: Bus, inbox: Inbox) -> None:
        """Put the request into its lane; repeated until the lane has it or time is up."""
        msg_id = random_token()
        while True:
            try:
                await bus.stream_publish(
                    PLACE,
                    self._request(inbox),
                    project=self._connection.project,
                    tail=lane_tail(self._connection.project, self._spec.qos, self._spec.backend),
                    msg_id=msg_id,
                    ttl_s=self._budget.remaining_s,
                    budget_s=min(_PUBLISH_S, self._budget.remaining_s),
                    request_id=self._request_id,
                )
                return
            except (Unavailable, DeadlineExceeded) as err:
                if self._budget.remaining_s <= _REPEAT_S:
                    raise
                await self._tell(Progress(request_id=self._request_id, reason=err.message))
                await asyncio.sleep(_REPEAT_S)

    def _request(self, inbox: Inbox) -> PlaceRequest:
        return PlaceRequest(
            request_id=self._request_id,
            key=self._key,
            reply_to=inbox.subject,
            nonce=inbox.nonce,
            count=self._count,
            budget_ms=int(self._budget.remaining_s * 1000),
            spec=self._spec,
        )

    async def _advance(self, bus: Bus, inbox: Inbox) -> None:
        """One message from the inbox, or what kept it away."""
        item = await inbox.take(self._budget.remaining_s)
        if isinstance(item, PermissionDenied):
            raise item
        if isinstance(item, DSecError):
            # The connection was lost or announcements were: ask again for what is known.
            await self._tell(Progress(request_id=self._request_id, reason=item.message))
            await asyncio.sleep(min(_REPEAT_S, self._budget.remaining_s))
            await self._publish(bus, inbox)
        elif (err := item.error()) is not None:
            self._settle_open(err)
        elif item.kind == KIND_PROGRESS:
            await self._tell(item.decode(Progress))
        elif item.kind == KIND_ANNOUNCE:
            self._settle(item.decode(Announcement))

    async def _tell(self, progress: Progress) -> None:
        self._progress = progress
        await notify(self._on_progress, progress)

    def _settle(self, announcement: Announcement) -> None:
        """Announcements may come twice: the first word on an item counts."""
        for item in announcement.ready:
            known = self._outcomes.get(item.index)
            if known is None and 0 <= item.index < self._count:
                self._outcomes[item.index] = item
            elif isinstance(known, ReadyItem) and known.sandbox_id != item.sandbox_id:
                _log.error(
                    "request %s item %d was announced as %s and as %s",
                    self._request_id, item.index, known.sandbox_id, item.sandbox_id,
                )  # fmt: skip
        for index, reply in announcement.failed.items():
            if 0 <= index < self._count:
                self._outcomes.setdefault(index, reply.exception())

    def _settle_open(self, err: DSecError) -> None:
        for index in range(self._count):
            self._outcomes.setdefault(index, err)

    def _in_words(self, err: DSecError) -> DSecError:
        """A timeout says why the request waited; any other error speaks for itself."""
        if not isinstance(err, DeadlineExceeded) or not self._budget.expired:
            return err
        return DeadlineExceeded(
            f"no sandbox within {self._timeout_s:g} s: {in_words(self._progress)}",
            hint="`dsec nodes` and `dsec queue` show what there is to wait for",
            request_id=self._request_id,
        )

    # --- giving up --------------------------------------------------------------------------------

    def _ready(self) -> frozenset[str]:
        items = self._outcomes.values()
        return frozenset(item.sandbox_id for item in items if isinstance(item, ReadyItem))

    async def _withdraw(
        self, stack: AsyncExitStack, bus: Bus, inbox: Inbox, keep: frozenset[str]
    ) -> None:
        async with stack:
            for sandbox_id in self._ready() - keep:
                await self._stop(bus, sandbox_id)
            with suppress(DSecError):
                await bus.request(
                    CANCEL,
                    CancelRequest(request_id=self._request_id, key=self._key, keep=tuple(keep)),
                    project=self._connection.project,
                    budget_s=_CANCEL_S,
                    request_id=self._request_id,
                )
            budget = Budget(_LINGER_S)
            with suppress(DeadlineExceeded):
                while not budget.expired:
                    await self._stop_strays(bus, await inbox.take(budget.remaining_s), keep)

    async def _stop_strays(self, bus: Bus, item: Part | DSecError, keep: frozenset[str]) -> None:
        if isinstance(item, Part) and item.kind == KIND_ANNOUNCE:
            for ready in item.decode(Announcement).ready:
                if ready.sandbox_id not in keep:
                    await self._stop(bus, ready.sandbox_id)

    async def _stop(self, bus: Bus, sandbox_id: str) -> None:
        with suppress(DSecError):
            await bus.request(
                STOP,
                StopSandbox(sandbox_id=sandbox_id),
                project=self._connection.project,
                node=sandbox_node(sandbox_id),
                budget_s=_CANCEL_S,
                request_id=self._request_id,
            )


def in_words(progress: Progress | None) -> str:
    """Why a request waits, for people."""
    if progress is None:
        return "it is queued, and no scheduler has said a word about it"
    if progress.position is None:
        return progress.reason
    return f"{progress.reason}; position {progress.position} in its lane"
