"""Spans: which are kept, found, forgotten, and which leave the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from libdsec.wire.trace import SpanRecord
from services.chassis.sampling import RecordAll
from services.chassis.span_export import SpanExport
from services.chassis.span_ring import SpanRing

CONVERSATION = "messaging.message.conversation_id"


class Recorder:
    """A provider of its own with a ring behind it."""

    def __init__(self, *, capacity: int = 100, ratio: float = 0.0) -> None:
        self.lost = 0
        self.ring = SpanRing(capacity, "edge", "n1", on_drop=self._lose)
        self.provider = TracerProvider(sampler=RecordAll(ratio), shutdown_on_exit=False)
        self.provider.add_span_processor(self.ring)

    def _lose(self) -> None:
        self.lost += 1

    @property
    def tracer(self) -> Tracer:
        tracer = self.provider.get_tracer("test")
        assert isinstance(tracer, Tracer)
        return tracer


def test_a_request_is_found_with_every_span_of_its_trace() -> None:
    recorder = Recorder()
    with (
        recorder.tracer.start_as_current_span("outer", attributes={CONVERSATION: "r1"}),
        recorder.tracer.start_as_current_span("inner", attributes={"n": 7}),
    ):
        pass
    with recorder.tracer.start_as_current_span("other", attributes={CONVERSATION: "r2"}):
        pass
    inner, outer = recorder.ring.of_request("r1")
    assert (inner.name, outer.name) == ("inner", "outer")
    assert inner.parent_id == outer.span_id
    assert outer.parent_id == ""
    assert (inner.service, inner.node, inner.attributes) == ("edge", "n1", {"n": "7"})
    assert inner.end_ns >= inner.start_ns > 0
    assert recorder.ring.of_trace(inner.trace_id) == [inner, outer]
    assert recorder.ring.of_request("r3") == []
    assert recorder.ring.of_trace("no trace id") == []


def test_the_oldest_are_forgotten_and_counted() -> None:
    recorder = Recorder(capacity=3)
    for n in range(5):
        recorder.tracer.start_span(str(n), attributes={CONVERSATION: f"r{n}"}).end()
    assert len(recorder.ring) == 3
    assert recorder.ring.dropped == recorder.lost == 2
    assert recorder.ring.of_request("r1") == []
    assert [span.name for span in recorder.ring.of_request("r2")] == ["2"]


def test_a_failure_keeps_what_it_said() -> None:
    recorder = Recorder()
    span = recorder.tracer.start_span("x", attributes={CONVERSATION: "r"})
    span.set_status(Status(StatusCode.ERROR, "no such layer"))
    span.end()
    assert recorder.ring.of_request("r")[0].error == "no such layer"


def test_a_clients_own_spans_are_kept_and_malformed_ones_are_not() -> None:
    recorder = Recorder()
    good = SpanRecord(
        trace_id="a" * 32, span_id="b" * 16, name="create", service="client", start_ns=1, end_ns=2
    )
    bad = good.model_copy(update={"trace_id": "not hex"})
    assert recorder.ring.add([good, bad]) == 1
    assert recorder.ring.of_trace("a" * 32) == [good]


def test_threads_may_end_spans_together() -> None:
    recorder = Recorder(capacity=50)

    def end_some() -> None:
        for _ in range(200):
            recorder.tracer.start_span("x").end()

    threads = [threading.Thread(target=end_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.ring) == 50
    assert recorder.ring.dropped == recorder.lost == 750


def start(recorder: Recorder, trace_id: int, *, sampled: bool) -> ReadableSpan:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    parent = NonRecordingSpan(SpanContext(trace_id, 1, is_remote=True, trace_flags=flags))
    span = recorder.tracer.start_span("x", context=set_span_in_context(parent))
    assert isinstance(span, ReadableSpan)
    return span


@pytest.mark.parametrize(
    ("trace_id", "parent_sampled", "sampled"),
    [
        (0x1, False, True),  # the id's lower half is below one per cent
        ((1 << 64) - 1, False, False),
        ((1 << 64) - 1, True, True),  # the caller's decision is honoured
        (0xFF << 64 | 0x1, False, True),
    ],
)
def test_every_process_decides_alike_and_records_anyway(
    trace_id: int, parent_sampled: bool, sampled: bool
) -> None:
    span = start(Recorder(ratio=0.01), trace_id, sampled=parent_sampled)
    assert span.context.trace_flags.sampled is sampled
    assert span.is_recording()  # type: ignore[attr-defined]


class Export:
    """An export into memory, emptied when it is asked what was sent."""

    def __init__(self, recorder: Recorder, *, slow_s: float = 60.0) -> None:
        self.lost = 0
        self.memory = InMemorySpanExporter()
        self._export = SpanExport(
            self.memory, recorder.ring, Resource.create({}), slow_s=slow_s, on_drop=self._lose
        )
        recorder.provider.add_span_processor(self._export)

    def _lose(self, count: int) -> None:
        self.lost += count

    def sent(self) -> list[str]:
        self._export._send_all()
        names = [span.name for span in self.memory.get_finished_spans()]
        self.memory.clear()
        return names

    def stop(self) -> list[str]:
        self._export.shutdown()
        return [span.name for span in self.memory.get_finished_spans()]


@pytest.fixture(autouse=True)
def _sent_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.chassis.span_export._INTERVAL_S", 3600)


@pytest.fixture
def unsampled() -> Recorder:
    return Recorder(ratio=0.0, capacity=20)


@pytest.fixture
def export(unsampled: Recorder) -> Iterator[Export]:
    export = Export(unsampled)
    yield export
    export.stop()


def test_an_unsampled_trace_stays_here(unsampled: Recorder, export: Export) -> None:
    unsampled.tracer.start_span("quiet").end()
    assert export.sent() == []


def test_a_failed_trace_goes_out_with_what_came_before_and_after(
    unsampled: Recorder, export: Export
) -> None:
    tracer = unsampled.tracer
    with tracer.start_as_current_span("root"):
        tracer.start_span("before").end()
        assert export.sent() == []
        failed = tracer.start_span("failed")
        failed.set_status(Status(StatusCode.ERROR, "boom"))
        failed.end()
        tracer.start_span("after").end()
        assert export.sent() == ["before", "failed", "after"]
    tracer.start_span("another trace").end()
    assert export.sent() == ["root"]


def test_a_slow_hop_goes_out_and_a_slow_step_alone_does_not(unsampled: Recorder) -> None:
    export = Export(unsampled, slow_s=1.0)
    for kind in (SpanKind.CONSUMER, SpanKind.INTERNAL):
        span = unsampled.tracer.start_span(kind.name, kind=kind, start_time=0)
        span.end(end_time=2_000_000_000)
    assert export.stop() == ["CONSUMER"]


def test_sampled_spans_go_out_once(export: Export, unsampled: Recorder) -> None:
    span = start(unsampled, 7, sampled=True)
    span.set_status(Status(StatusCode.ERROR, "also failed"))  # type: ignore[attr-defined]
    span.end()  # type: ignore[attr-defined]
    assert export.sent() == ["x"]
    assert export.sent() == []


def test_what_the_ring_forgot_before_it_was_sent_is_counted(
    unsampled: Recorder, export: Export
) -> None:
    for _ in range(25):
        unsampled.tracer.start_span("x").end()
    export.sent()
    assert export.lost == 5


def test_a_collector_that_fails_costs_spans_and_nothing_else(unsampled: Recorder) -> None:
    export = Export(unsampled)
    answers = iter([SpanExportResult.FAILURE])

    def refuse(spans: object) -> SpanExportResult:
        return next(answers)  # then StopIteration: an exporter's own bug

    export.memory.export = refuse  # type: ignore[method-assign]
    for trace_id in (1, 2):
        start(unsampled, trace_id, sampled=True).end()  # type: ignore[attr-defined]
        export.sent()
    assert export.lost == 2
    export.stop()
