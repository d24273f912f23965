"""A client's way to DSec: one bus for commands and, from its first use on, one for bulk data.

It owns the connections, the background work that outlives a call, and the rule for repeating: an
`Unavailable` that says when to come back was refused *before* anything was done (nobody there, too
busy), so the same message may be sent again while an edge or a scheduler restarts; any other may
have been carried out and is the caller's to judge. Silence is no answer either: whoever was asked
may have been killed with the request in its hands, and its successor does not know of it. So what
does no harm twice is asked again while the first asking still waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

from .bus import Budget, Bus
from .errors import DSecError, InvalidArgument, Unavailable
from .operation import Operation, operation
from .settings import ClientSettings
from .span_report import SpanReport
from .wire.defaults import LEASE_S, SUSPECT_AFTER_S
from .wire.envelope import Rpc
from .wire.model import Message
from .wire.subjects import REPORT_SPANS
from .wire.trace import ReportSpans

# A library's warnings are for whoever configures logging; unasked they would go to stderr.
logging.getLogger("libdsec").addHandler(logging.NullHandler())

Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)

CALL_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 3.0
SILENCE_S = SUSPECT_AFTER_S  # then the same is asked again; each time twice as late
_REPEAT_S = 0.5


class Connection:
    """Opened on first use; belongs to the event loop and process that opened it."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._bus: Bus | None = None
        self._bulk: Bus | None = None
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._opening = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self.spans = SpanReport(self._send_spans)

    @property
    def project(self) -> str:
        return self.settings.project

    async def bus(self) -> Bus:
        """The bus for everything that must not wait behind bulk data."""
        if self._bus is None:
            async with self._opening:
                if self._bus is None:
                    self._bus = await self._connect("libdsec")
                    self._owner = os.getpid(), asyncio.get_running_loop()
        if self._owner != (os.getpid(), asyncio.get_running_loop()):
            raise InvalidArgument(
                "this client was opened in another event loop or process",
                hint="make one client per event loop, or use libdsec.sync, which may be shared",
            )
        return self._bus

    async def bulk(self) -> Bus:
        """The bus for files and layers."""
        await self.bus()
        if self._bulk is None:
            async with self._opening:
                if self._bulk is None:
                    self._bulk = await self._connect("libdsec-bulk")
        return self._bulk

    async def close(self) -> None:
        """Finish what runs in the background, briefly, and disconnect. Idempotent."""
        if self._bus is None:
            return
        if self._background:
            await asyncio.wait(self._background, timeout=_CLOSE_TIMEOUT_S)
        for task in self._background:
            task.cancel()
        await self.spans.close()
        buses = [bus for bus in (self._bus, self._bulk) if bus is not None]
        self._bus = self._bulk = self._owner = None
        await asyncio.gather(*(bus.drain(timeout_s=_CLOSE_TIMEOUT_S) for bus in buses))

    async def call(
        self,
        rpc: Rpc[Req, Rep],
        message: Req,
        *,
        op: Operation,
        node: str = "*",
        budget_s: float = CALL_TIMEOUT_S,
        patience_s: float = LEASE_S,
        bulk: bool = False,
        idempotent: bool = False,
    ) -> Rep:
        """Ask and wait, coming back for `patience_s` to one who is not there or too busy.

        Args:
            idempotent: doing it twice is as good as once, so it is repeated after a lost
                connection and after silence as well.

        Raises:
            Unavailable: names the node, where the message was for one.
        """
        bus = await (self.bulk() if bulk else self.bus())
        budget, patience = Budget(budget_s), Budget(min(budget_s, patience_s))

        async def ask() -> Rep:
            return await bus.request(
                rpc,
                message,
                project=self.project,
                node=node,
                budget_s=budget.remaining_s,
                request_id=op.request_id,
            )

        while True:
            try:
                return await (_insisting(ask, budget) if idempotent else ask())
            except Unavailable as err:
                wait_s = err.retry_after_s
                if wait_s is None and idempotent:
                    wait_s = _REPEAT_S
                if wait_s is None or wait_s >= patience.remaining_s:
                    raise named(err, node) from None
                await asyncio.sleep(wait_s)

    def operation(
        self, name: str, *, node: str = "", current: bool = True, request_id: str = ""
    ) -> AbstractContextManager[Operation]:
        """Run one call of the surface, see `libdsec.operation`."""
        return operation(name, self.spans.add, node=node, current=current, request_id=request_id)

    def refuse(self, name: str, err: DSecError) -> NoReturn:
        """Raise what a call is refused with before it sends anything; it has ids like any other."""
        with self.operation(name):
            raise err

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the caller; `close` waits for it a moment."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # seen: background work is best effort by definition

    async def _connect(self, name: str) -> Bus:
        settings = self.settings
        return await Bus.connect(
            settings.required_servers(),
            name=name,
            user=settings.user,
            password=settings.password,
            creds=settings.credentials,
            tls=settings.tls(),
            inbox_prefix=settings.inbox_prefix,
        )

    async def _send_spans(self, node: str, spans: ReportSpans) -> None:
        if self._bus is None:
            return
        try:
            await self._bus.publish(REPORT_SPANS, spans, project=self.project, node=node)
        except DSecError:
            self.spans.dropped += len(spans.spans)


async def _insisting(ask: Callable[[], Awaitable[Rep]], budget: Budget) -> Rep:
    """The first answer to any of several askings."""
    askings: set[asyncio.Task[Rep]] = set()
    silence_s = SILENCE_S
    try:
        while True:
            askings.add(asyncio.ensure_future(ask()))
            answered, _ = await asyncio.wait(
                askings,
                timeout=silence_s if silence_s < budget.remaining_s else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if answered:
                return answered.pop().result()
            silence_s *= 2
    finally:
        for asking in askings:
            asking.cancel()
        await asyncio.gather(*askings, return_exceptions=True)


def named(err: Unavailable, node: str) -> Unavailable:
    """The error with the node in front, where one was spoken to."""
    if node == "*":
        return err
    return Unavailable(
        f"node {node}: {err.message}",
        hint=err.hint or "`dsec nodes` shows whether it is live, suspect or lost",
        request_id=err.request_id,
        trace_id=err.trace_id,
        retry_after_s=err.retry_after_s,
    )
