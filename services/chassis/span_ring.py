"""The finished spans of this process, as many as fit, found by trace or by request.

A fixed number is kept, the oldest are forgotten first, and how many were is said in every answer.
Ending a span costs a lock, two appends and a look-up; everything else waits until somebody asks.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import StatusCode

from libdsec.wire.trace import SpanRecord

_REQUEST = "messaging.message.conversation_id"
_VALUE_CHARS = 256
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


class SpanRing(SpanProcessor):
    """Keeps spans of the SDK and records that a client reported; threads may end spans, too."""

    def __init__(
        self, capacity: int, service: str, node: str = "", *, on_drop: Callable[[], None]
    ) -> None:
        self.dropped = 0
        self._capacity = capacity
        self._service = service
        self._node = node
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._order: deque[int] = deque()  # the trace id of each span, oldest first
        self._traces: dict[int, deque[ReadableSpan | SpanRecord]] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        self._keep(span.context.trace_id, span)

    def add(self, records: Iterable[SpanRecord]) -> None:
        """Keep what a client measured and has nowhere to keep; malformed records are ignored."""
        for record in records:
            if _TRACE_ID.fullmatch(record.trace_id):
                self._keep(int(record.trace_id, 16), record)

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._order)

    def spans_of(self, trace_id: int) -> list[ReadableSpan]:
        """The process's own spans of a trace, for the export."""
        with self._lock:
            kept = tuple(self._traces.get(trace_id, ()))
        return [span for span in kept if isinstance(span, ReadableSpan)]

    def of_trace(self, trace_id: str) -> list[SpanRecord]:
        """All spans of a trace; none for what is not a trace id."""
        if not _TRACE_ID.fullmatch(trace_id):
            return []
        with self._lock:
            kept = tuple(self._traces.get(int(trace_id, 16), ()))
        return [self._record(span) for span in kept]

    def of_request(self, request_id: str) -> list[SpanRecord]:
        """All spans of every trace in which the request appears."""
        with self._lock:
            traces = [tuple(spans) for spans in self._traces.values()]
        found = (spans for spans in traces if any(_request(span) == request_id for span in spans))
        return [self._record(span) for span in chain.from_iterable(found)]

    def _keep(self, trace_id: int, span: ReadableSpan | SpanRecord) -> None:
        with self._lock:
            if len(self._order) >= self._capacity:
                self._forget_oldest()
            self._order.append(trace_id)
            spans = self._traces.get(trace_id)
            if spans is None:
                spans = self._traces[trace_id] = deque()
            spans.append(span)

    def _forget_oldest(self) -> None:
        trace_id = self._order.popleft()
        spans = self._traces[trace_id]
        spans.popleft()
        if not spans:
            del self._traces[trace_id]
        self.dropped += 1
        self._on_drop()

    def _record(self, span: ReadableSpan | SpanRecord) -> SpanRecord:
        if isinstance(span, SpanRecord):
            return span
        error = span.status.description or "error" if failed(span) else ""
        return SpanRecord(
            trace_id=f"{span.context.trace_id:032x}",
            span_id=f"{span.context.span_id:016x}",
            parent_id=f"{span.parent.span_id:016x}" if span.parent is not None else "",
            name=span.name,
            service=self._service,
            node=self._node,
            start_ns=span.start_time or 0,
            end_ns=span.end_time or 0,
            error=error[:_VALUE_CHARS],
            attributes={
                name: str(value)[:_VALUE_CHARS] for name, value in (span.attributes or {}).items()
            },
        )


def failed(span: ReadableSpan) -> bool:
    return span.status.status_code is StatusCode.ERROR


def _request(span: ReadableSpan | SpanRecord) -> str:
    attributes = span.attributes or {}
    return str(attributes.get(_REQUEST, ""))
