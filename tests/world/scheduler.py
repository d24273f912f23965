"""The scheduler of the small DSec: claims by key, placement in turn, everything announced."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from libdsec.bus import Bus, Call
from libdsec.errors import Conflict, DSecError
from libdsec.wire.deadletter import (
    DeadLetter,
    DeadLetterAction,
    DeadLetterListing,
    DeadLetterOutcome,
    DeadLetterQuery,
    LaneDepth,
    QueueListing,
    QueueQuery,
)
from libdsec.wire.error import ErrorReply
from libdsec.wire.model import Empty
from libdsec.wire.node import Heartbeat, Load, NodeListing, NodeState, NodeView
from libdsec.wire.placement import (
    Announcement,
    CancelRequest,
    PlaceRequest,
    Progress,
    ReadyItem,
)
from libdsec.wire.sandbox import SandboxSpec
from libdsec.wire.subjects import (
    CANCEL,
    DLQ_DISCARD,
    DLQ_LIST,
    DLQ_REPLAY,
    NODES,
    PLACE,
    Q_SCHEDULERS,
    QUEUE,
)

from .edge import Edge


@dataclass
class Held:
    """A claim: what was asked for and what came of it."""

    spec: SandboxSpec
    count: int
    items: dict[int, str] = field(default_factory=dict)


Place = Callable[[PlaceRequest, Call], Awaitable[None]]


class Scheduler:
    """Serves placements. A test may put its own `place` in front, and read what was asked."""

    def __init__(self, *edges: Edge) -> None:
        self.edges = list(edges)
        self.states: dict[str, NodeState] = {}
        self.place: Place = self.place_all
        self.requests: list[PlaceRequest] = []
        self.cancelled: list[CancelRequest] = []
        self.claims: dict[tuple[str, str], Held] = {}
        self.letters: dict[int, DeadLetter] = {}
        self.group = 16

    async def serve(self, bus: Bus) -> None:
        self.bus = bus
        await bus.subscribe(PLACE, self._placed, project="*", tail=">", concurrency=256)
        await bus.serve(CANCEL, self.cancel, project="*", queue=Q_SCHEDULERS)
        await bus.serve(NODES, self.nodes, project="*", queue=Q_SCHEDULERS)
        await bus.serve(QUEUE, self.queue, project="*", queue=Q_SCHEDULERS)
        await bus.serve(DLQ_LIST, self.dead_letters, queue=Q_SCHEDULERS)
        await bus.serve(DLQ_REPLAY, self.settle, queue=Q_SCHEDULERS)
        await bus.serve(DLQ_DISCARD, self.settle, queue=Q_SCHEDULERS)

    async def _placed(self, request: PlaceRequest, call: Call) -> None:
        self.requests.append(request)
        await self.place(request, call)

    async def place_all(self, request: PlaceRequest, call: Call) -> None:
        """Place every item in turn over the edges; announce in groups."""
        claim = self.claims.setdefault(
            (call.project, request.key), Held(request.spec, request.count)
        )
        if (claim.spec, claim.count) != (request.spec, request.count):
            await self.fail(request, Conflict(f"key {request.key} was used otherwise"))
            return
        try:
            for index in range(request.count):
                if index not in claim.items:
                    edge = self.edges[index % len(self.edges)]
                    claim.items[index] = edge.accept(request.spec, call.project, request.request_id)
        except DSecError as err:
            await self.fail(request, err)
            return
        indexes = sorted(claim.items)
        for first in range(0, len(indexes), self.group):
            chosen = indexes[first : first + self.group]
            await self.announce(request, {i: claim.items[i] for i in chosen})

    async def announce(
        self,
        request: PlaceRequest,
        items: dict[int, str],
        failed: dict[int, DSecError] | None = None,
        *,
        nonce: str | None = None,
    ) -> None:
        announcement = Announcement(
            request_id=request.request_id,
            ready=tuple(
                ReadyItem(
                    index=index, sandbox_id=sandbox_id, node=sandbox_id.partition("_")[0],
                    created_at=time.time(), phases_ms={"queued": 1.0, "start": 2.0},
                )
                for index, sandbox_id in items.items()
            ),
            failed={index: ErrorReply.of(err) for index, err in (failed or {}).items()},
        )  # fmt: skip
        await self.bus.send(
            request.reply_to, "announce", announcement,
            nonce=request.nonce if nonce is None else nonce,
        )  # fmt: skip

    async def fail(self, request: PlaceRequest, err: DSecError) -> None:
        await self.bus.send_error(request.reply_to, err, nonce=request.nonce)

    async def tell(self, request: PlaceRequest, reason: str, **more: object) -> None:
        progress = Progress(request_id=request.request_id, reason=reason, **more)
        await self.bus.send(request.reply_to, "progress", progress, nonce=request.nonce)

    async def cancel(self, message: CancelRequest, call: Call) -> Empty:
        self.cancelled.append(message)
        return Empty()

    async def nodes(self, message: Empty, call: Call) -> NodeListing:
        views = [
            NodeView(
                heartbeat=Heartbeat(
                    node=edge.node, incarnation=edge.incarnation, session="s", seq=1,
                    backends=("container",), capabilities=("publish", "disk=loop"),
                    running=len(edge.boxes), max_sandboxes=100, policy_ready=True,
                    snapshotter_ready=True, load=Load(memory=0.25),
                ),
                state=self.states.get(edge.node, NodeState.LIVE),
                age_s=0.4,
            )
            for edge in self.edges
        ]  # fmt: skip
        return NodeListing(nodes=tuple(views))

    async def queue(self, message: QueueQuery, call: Call) -> QueueListing:
        return QueueListing(lanes=(LaneDepth(lane="be.container", waiting=3, oldest_age_s=1.5),))

    async def dead_letters(self, message: DeadLetterQuery, call: Call) -> DeadLetterListing:
        letters = [*self.letters.values()]
        return DeadLetterListing(letters=tuple(letters[: message.limit]), total=len(letters))

    async def settle(self, message: DeadLetterAction, call: Call) -> DeadLetterOutcome:
        done = tuple(seq for seq in message.seqs if self.letters.pop(seq, None) is not None)
        failed = {seq: "there is no such letter" for seq in message.seqs if seq not in done}
        return DeadLetterOutcome(done=done, failed=failed)
