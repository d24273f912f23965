"""Which spans leave the process, and how: sampled traces, and those that failed or were slow.

The SDK's own batching drops whatever was not sampled when it began; whether a request failed is
only known when it ends. So a trace is marked at that moment. A thread reads the ring every other
second, sends what was sampled or marked, and for a newly marked trace what the ring still has of
it. It never holds up the event loop; what the ring forgot before it came by is counted.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from .span_ring import KeptSpan, SpanRing

_log = logging.getLogger("dsec.telemetry")

_BATCH = 512
_INTERVAL_S = 2.0
_MARKED_TRACES = 4096  # the oldest mark is forgotten first: its later spans stay here


class SpanExport(SpanProcessor):
    """Sends what deserves it to `exporter`. Lifecycle: made → on_end (often) → shutdown."""

    def __init__(
        self,
        exporter: SpanExporter,
        ring: SpanRing,
        resource: Resource,
        *,
        slow_s: float,
        on_drop: Callable[[int], None],
    ) -> None:
        self._exporter = exporter
        self._ring = ring
        self._resource = resource
        self._slow_ns = int(slow_s * 1e9)
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._marked: OrderedDict[int, None] = OrderedDict()
        self._newly: set[int] = set()
        self._position = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        if span.status.status_code is StatusCode.ERROR or self._slow(span):
            with self._lock:
                self._mark(span.context.trace_id)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Send what waits, for at most `timeout_s`."""
        self._ended.set()
        self._thread.join(timeout_s)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def _slow(self, span: ReadableSpan) -> bool:
        duration_ns = (span.end_time or 0) - (span.start_time or 0)
        return span.kind is SpanKind.CONSUMER and duration_ns > self._slow_ns

    def _mark(self, trace_id: int) -> None:
        if trace_id not in self._marked:
            self._newly.add(trace_id)
            self._marked[trace_id] = None
            if len(self._marked) > _MARKED_TRACES:
                self._marked.popitem(last=False)

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._send_all()
        self._send_all()
        self._exporter.shutdown()

    def _send_all(self) -> None:
        chosen = self._choose()
        while batch := [self._rebuilt(span) for span in islice(chosen, _BATCH)]:
            try:
                result = self._exporter.export(batch)
            except Exception as err:  # a collector's fault must not end the thread
                _log.warning("spans were not exported: %r", err)
                result = SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS:
                self._on_drop(len(batch))

    def _choose(self) -> Iterator[KeptSpan]:
        """What is to be sent now, each span once."""
        with self._lock:
            marked, newly = set(self._marked), self._newly
            self._newly = set()
        position, spans = self._ring.since(0)
        fresh = position - self._position  # the last so many have not been looked at
        self._position = position
        if (missed := fresh - len(spans)) > 0:
            self._on_drop(missed)
        seen = max(0, len(spans) - fresh)
        yield from (s for s in spans[:seen] if s.trace_id in newly and not s.sampled)
        yield from (s for s in spans[seen:] if s.sampled or s.trace_id in marked)

    def _rebuilt(self, span: KeptSpan) -> ReadableSpan:
        flags = TraceFlags(TraceFlags.SAMPLED)
        parent = (
            SpanContext(span.trace_id, span.parent_id, is_remote=False) if span.parent_id else None
        )
        return ReadableSpan(
            name=span.name,
            context=SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=flags),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,  # type: ignore[arg-type]  # as the SDK gave them
            kind=span.kind,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
        )
