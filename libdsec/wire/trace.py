"""Spans as they are asked for by `dsec trace`."""

from __future__ import annotations

from .model import Message


class TraceQuery(Message):
    """By trace id or by request id; one of the two."""

    trace_id: str = ""
    request_id: str = ""


class SpanRecord(Message):
    trace_id: str
    span_id: str
    parent_id: str = ""
    name: str
    service: str
    node: str = ""
    start_ns: int  # since the epoch, by the recorder's clock
    end_ns: int
    error: str = ""
    attributes: dict[str, str] = {}


class Spans(Message):
    service: str
    instance: str
    spans: tuple[SpanRecord, ...] = ()
    dropped: int = 0  # spans this process has forgotten so far, of any trace


class ReportSpans(Message):
    """A client's own spans, which it has nowhere to keep."""

    spans: tuple[SpanRecord, ...]
