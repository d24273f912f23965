"""The finished spans of this process, as many as fit, found by trace or by request.

A fixed number is kept, the oldest are forgotten first, and how many were is said in every answer.
What is kept is a small tuple per span: the SDK's own objects would be four times as large and would
make every full garbage collection a pause of a sixth of a second. Looking something up reads all of
it, which takes a millisecond or two and happens when somebody asks.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from libdsec.wire.trace import SpanRecord

_REQUEST = "messaging.message.conversation_id"
_VALUE_CHARS = 256
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")


class KeptSpan(NamedTuple):
    """One finished span. A client's own has its service's name in `service`."""

    trace_id: int
    span_id: int
    parent_id: int
    name: str
    kind: SpanKind
    start_ns: int
    end_ns: int
    error: str
    sampled: bool
    attributes: dict[str, object]
    service: str = ""

    @classmethod
    def of(cls, span: ReadableSpan) -> KeptSpan:
        context, status = span.context, span.status
        error = ""
        if status.status_code is StatusCode.ERROR:
            error = status.description or "error"
        return cls(
            context.trace_id,
            context.span_id,
            span.parent.span_id if span.parent is not None else 0,
            span.name,
            span.kind,
            span.start_time or 0,
            span.end_time or 0,
            error,
            bool(context.trace_flags.sampled),
            dict(span.attributes or {}),
        )

    @classmethod
    def reported(cls, record: SpanRecord) -> KeptSpan:
        return cls(
            int(record.trace_id, 16),
            int(record.span_id, 16),
            int(record.parent_id or "0", 16),
            record.name,
            SpanKind.CLIENT,
            record.start_ns,
            record.end_ns,
            record.error,
            False,
            dict(record.attributes),
            record.service,
        )

    def record(self, service: str, node: str) -> SpanRecord:
        return SpanRecord(
            trace_id=f"{self.trace_id:032x}",
            span_id=f"{self.span_id:016x}",
            parent_id=f"{self.parent_id:016x}" if self.parent_id else "",
            name=self.name,
            service=self.service or service,
            node="" if self.service else node,
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            error=self.error[:_VALUE_CHARS],
            attributes={name: str(v)[:_VALUE_CHARS] for name, v in self.attributes.items()},
        )


class SpanRing(SpanProcessor):
    """Keeps spans of the SDK and records that clients reported; threads may end spans, too."""

    def __init__(
        self, capacity: int, service: str, node: str = "", *, on_drop: Callable[[], None]
    ) -> None:
        self._spans: deque[KeptSpan] = deque(maxlen=capacity)
        self._capacity = capacity
        self._service = service
        self._node = node
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._count = 0

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        self._keep(KeptSpan.of(span))

    def add(self, records: Iterable[SpanRecord]) -> int:
        """Keep what a client measured and cannot keep; returns how many were well-formed."""
        kept = [KeptSpan.reported(record) for record in records if _well_formed(record)]
        for span in kept:
            self._keep(span)
        return len(kept)

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def dropped(self) -> int:
        """How many have been forgotten so far."""
        return self._count - len(self._spans)

    def since(self, position: int) -> tuple[int, list[KeptSpan]]:
        """The present position, and what was kept after an earlier one and is still there."""
        with self._lock:
            newer = min(self._count - position, len(self._spans))
            return self._count, list(islice(self._spans, len(self._spans) - newer, None))

    def of_trace(self, trace_id: str) -> list[SpanRecord]:
        """All spans of a trace; none for what is not a trace id."""
        if not _TRACE_ID.fullmatch(trace_id):
            return []
        return self._records({int(trace_id, 16)})

    def of_request(self, request_id: str) -> list[SpanRecord]:
        """All spans of every trace in which the request appears."""
        _, spans = self.since(0)
        return self._records(
            {span.trace_id for span in spans if span.attributes.get(_REQUEST) == request_id}
        )

    def _records(self, trace_ids: set[int]) -> list[SpanRecord]:
        _, spans = self.since(0)
        return [
            span.record(self._service, self._node) for span in spans if span.trace_id in trace_ids
        ]

    def _keep(self, span: KeptSpan) -> None:
        with self._lock:
            self._count += 1
            full = len(self._spans) == self._capacity
            self._spans.append(span)
        if full:
            self._on_drop()


def _well_formed(record: SpanRecord) -> bool:
    return bool(
        _TRACE_ID.fullmatch(record.trace_id)
        and _SPAN_ID.fullmatch(record.span_id)
        and (not record.parent_id or _SPAN_ID.fullmatch(record.parent_id))
    )
