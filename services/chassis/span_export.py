"""Which spans leave the process, and how: sampled traces, and those that failed or were slow.

The SDK's own batching drops whatever was not sampled when it began; whether a request failed is
only known when it ends. So a trace is marked at that moment, what the ring still has of it goes
out, and its later spans follow. A thread sends in batches; it never holds up the event loop, and a
collector that is away costs the oldest waiting spans, counted.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from .span_ring import SpanRing, failed

_log = logging.getLogger("dsec.telemetry")

_BATCH = 512
_INTERVAL_S = 2.0
_MARKED_TRACES = 4096


class SpanExport(SpanProcessor):
    """Sends what deserves it to `exporter`. Lifecycle: made → on_end (often) → shutdown."""

    def __init__(
        self,
        exporter: SpanExporter,
        ring: SpanRing,
        *,
        slow_s: float,
        on_drop: Callable[[int], None],
        capacity: int = 8192,
    ) -> None:
        self._exporter = exporter
        self._ring = ring
        self._slow_ns = int(slow_s * 1e9)
        self._on_drop = on_drop
        self._capacity = capacity
        self._lock = threading.Lock()
        self._waiting: deque[ReadableSpan] = deque()
        self._marked: OrderedDict[int, None] = OrderedDict()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        trace_id = span.context.trace_id
        if span.context.trace_flags.sampled or trace_id in self._marked:
            self._enqueue([span])
        elif failed(span) or self._slow(span):
            self._mark(trace_id)
            self._enqueue(self._ring.spans_of(trace_id) or [span])

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Send what waits, for at most `timeout_s`."""
        self._ended.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        self._wake.set()
        return True

    def _slow(self, span: ReadableSpan) -> bool:
        duration_ns = (span.end_time or 0) - (span.start_time or 0)
        return span.kind is SpanKind.CONSUMER and duration_ns > self._slow_ns

    def _mark(self, trace_id: int) -> None:
        with self._lock:
            self._marked[trace_id] = None
            if len(self._marked) > _MARKED_TRACES:
                self._marked.popitem(last=False)

    def _enqueue(self, spans: list[ReadableSpan]) -> None:
        with self._lock:
            self._waiting.extend(spans)
            excess = len(self._waiting) - self._capacity
            for _ in range(excess):
                self._waiting.popleft()
        if excess > 0:
            self._on_drop(excess)
        if len(self._waiting) >= _BATCH:
            self._wake.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(_INTERVAL_S)
            self._wake.clear()
            self._send_all()
        self._send_all()
        self._exporter.shutdown()

    def _send_all(self) -> None:
        while True:
            with self._lock:
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            if not batch:
                return
            try:
                result = self._exporter.export(batch)
            except Exception as err:  # a collector's fault must not end the thread
                _log.warning("spans were not exported: %r", err)
                result = SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS:
                self._on_drop(len(batch))
