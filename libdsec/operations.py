"""What people on call do: look into a request, command a node, settle dead letters.

Nodes and dead letters are an operator's business; other credentials get PermissionDenied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .connection import Connection
from .errors import NotFound, Unsupported
from .operation import Operation
from .span_tree import Trace, merge
from .wire.deadletter import (
    DeadLetterAction,
    DeadLetterListing,
    DeadLetterOutcome,
    DeadLetterQuery,
)
from .wire.envelope import Rpc
from .wire.ids import check_node
from .wire.model import Empty
from .wire.node import NodeCapabilities, NodeCommand
from .wire.subjects import (
    DLQ_DISCARD,
    DLQ_LIST,
    DLQ_REPLAY,
    NODE_CAPABILITIES,
    NODE_CORDON,
    NODE_DRAIN,
    NODE_UNCORDON,
    TRACE,
)
from .wire.trace import Spans, TraceQuery

_TRACE_S = 1.5
_DRAIN_S = 120.0
_MAX_TRACES = 8


class Operations:
    """`client.operations`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def trace(self, request_id: str, *, timeout: float = _TRACE_S) -> Trace:
        """Everything that every process still knows of a request.

        Raises:
            NotFound: nobody remembers it.
        """
        with self._connection.operation("trace") as op:
            first = await self._spans(op, TraceQuery(request_id=request_id), timeout)
            spans = merge(answer.spans for answer in first.values())
            if not spans:
                raise NotFound(
                    f"no process remembers request {request_id}",
                    hint="the newest few thousand spans of each process are kept",
                )
            # Who knows the trace but not the request's id is asked by the trace's.
            ids = sorted({span.trace_id for span in spans})[:_MAX_TRACES]
            more = await asyncio.gather(
                *(self._spans(op, TraceQuery(trace_id=trace_id), timeout) for trace_id in ids)
            )
            answers = [first, *more]
            return Trace(
                request_id=request_id,
                spans=merge(spans.spans for answer in answers for spans in answer.values()),
                sources=tuple(sorted({name for answer in answers for name in answer})),
                dropped=sum(spans.dropped for spans in first.values()),
            )

    async def logs(self, request_id: str) -> list[str]:
        """A request's log lines."""
        self._connection.refuse(
            "logs",
            Unsupported(
                f"log lines of {request_id} are not gathered yet",
                hint="search the services' logs for it; `dsec trace` shows where it went",
            ),
        )

    async def cordon(self, node: str) -> None:
        """Place nothing more on the node; what runs there goes on."""
        await self._order("cordon", NODE_CORDON, node)

    async def uncordon(self, node: str) -> None:
        """Take it into service again."""
        await self._order("uncordon", NODE_UNCORDON, node)

    async def drain(self, node: str) -> None:
        """Cordon it until what runs there has ended by itself, within its own limits."""
        await self._order("drain", NODE_DRAIN, node, budget_s=_DRAIN_S)

    async def capabilities(self, node: str) -> NodeCapabilities:
        """What the node's own probe found, and why not."""
        with self._connection.operation("capabilities") as op:
            return await self._connection.call(
                NODE_CAPABILITIES, Empty(), op=op, node=check_node(node), idempotent=True
            )

    async def dead_letters(self, *, limit: int = 100) -> DeadLetterListing:
        """Messages that nobody could handle, the oldest first."""
        with self._connection.operation("dlq.list") as op:
            return await self._connection.call(
                DLQ_LIST, DeadLetterQuery(limit=limit), op=op, idempotent=True
            )

    async def replay(self, seqs: Sequence[int]) -> DeadLetterOutcome:
        """Publish dead letters again, as they were."""
        with self._connection.operation("dlq.replay") as op:
            return await self._connection.call(
                DLQ_REPLAY, DeadLetterAction(seqs=tuple(seqs)), op=op
            )

    async def discard(self, seqs: Sequence[int]) -> DeadLetterOutcome:
        """Forget dead letters."""
        with self._connection.operation("dlq.discard") as op:
            return await self._connection.call(
                DLQ_DISCARD, DeadLetterAction(seqs=tuple(seqs)), op=op
            )

    async def _order(
        self, verb: str, rpc: Rpc[NodeCommand, Empty], node: str, *, budget_s: float = 30.0
    ) -> None:
        with self._connection.operation(verb) as op:
            command = NodeCommand(node=check_node(node), by=self._connection.settings.user or "")
            await self._connection.call(
                rpc, command, op=op, node=node, budget_s=budget_s, idempotent=True
            )

    async def _spans(self, op: Operation, query: TraceQuery, timeout: float) -> dict[str, Spans]:
        bus = await self._connection.bus()
        gathered = await bus.gather(
            TRACE, query, timeout_s=timeout, request_id=op.request_id,
            project=self._connection.project,
        )  # fmt: skip
        if gathered.errors and not gathered.replies:
            raise next(iter(gathered.errors.values()))
        return dict(gathered.replies)
