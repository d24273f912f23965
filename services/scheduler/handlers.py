"""The verbs that a scheduler answers: to edges, to callers, to operators."""

from __future__ import annotations

from libdsec.bus import Bus, Call
from libdsec.errors import InvalidArgument, PermissionDenied, Unavailable
from libdsec.wire import subjects
from libdsec.wire.deadletter import QueueListing, QueueQuery
from libdsec.wire.ids import check_project, sandbox_node
from libdsec.wire.model import Empty
from libdsec.wire.node import NodeListing
from libdsec.wire.placement import (
    AcceptedItem,
    CancelRequest,
    Inquiry,
    RetryReply,
    RetryRequest,
    Verdicts,
)

from ..chassis.dead_letter import DeadLetters
from .driver import Driver
from .queue import read_queue
from .rulings import cancel, free, rule
from .view import View


class Verbs:
    """serve() answers together with all other schedulers: each request goes to one of them."""

    def __init__(self, bus: Bus, driver: Driver, view: View) -> None:
        self._bus = bus
        self._driver = driver
        self._view = view

    async def serve(self) -> None:
        queue = subjects.Q_SCHEDULERS
        bus = self._bus
        await bus.serve(subjects.INQUIRE, self.inquire, queue=queue, backlog=256)
        await bus.serve(subjects.RETRY, self.retry, queue=queue, backlog=256)
        await bus.serve(subjects.CANCEL, self.cancel, queue=queue, backlog=256)
        await bus.serve(subjects.NODES, self.nodes, queue=queue)
        await bus.serve(subjects.QUEUE, self.queue, queue=queue, concurrency=4)
        await DeadLetters(bus).serve(queue)

    async def inquire(self, inquiry: Inquiry, call: Call) -> Verdicts:
        """A node speaks for its own sandboxes only."""
        for held in inquiry.held:
            _check_own(call.node, (*held.items, *held.ended))
        verdicts = [await self._driver.run(rule(held)) for held in inquiry.held]
        return Verdicts(verdicts=tuple(verdicts))

    async def retry(self, retry: RetryRequest, call: Call) -> RetryReply:
        _check_own(call.node, retry.items)
        project = check_project(retry.project)
        if not retry.place.reply_to.startswith(f"_INBOX.{project}."):
            raise InvalidArgument(f"reply_to is not an inbox of project {project!r}")
        return await self._driver.run(free(retry))

    async def cancel(self, request: CancelRequest, call: Call) -> Empty:
        left = await self._driver.run(cancel(check_project(call.project), request))
        if left:
            raise Unavailable(
                f"cancelled, but the nodes of {len(left)} sandboxes did not answer",
                hint="say it again; they end at the latest when those nodes are back",
                retry_after_s=1.0,
            )
        return Empty()

    async def nodes(self, _query: Empty, _call: Call) -> NodeListing:
        return self._view.listing()

    async def queue(self, _query: QueueQuery, call: Call) -> QueueListing:
        return await read_queue(self._bus, check_project(call.project))


def _check_own(node: str, items: tuple[AcceptedItem, ...]) -> None:
    for item in items:
        if sandbox_node(item.sandbox_id) != node:
            raise PermissionDenied(
                f"node {node} speaks for {item.sandbox_id}, which is not its own"
            )
