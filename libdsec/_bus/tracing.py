"""W3C trace context over NATS headers, and the span of each hop.

No instrumentation for NATS exists, so it is written by hand here, and only for `traceparent`: it
costs two microseconds where the propagation API costs ten. Without an OpenTelemetry SDK in the
process nothing is recorded, yet every request still carries a trace id of its own, so that what the
services record about it belongs together and errors can name it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)

from ..errors import DSecError
from ..wire.envelope import H_TRACEPARENT

TRACEPARENT = H_TRACEPARENT.lower()

_tracer = trace.get_tracer("libdsec.bus")


@dataclass(slots=True)
class Hop:
    """The span of one message and the ids it is known by."""

    span: Span
    trace_id: str
    traceparent: str = ""

    def end(self, error: DSecError | None = None) -> None:
        if self.span.is_recording():
            if error is not None:
                self.span.set_attribute("error.type", error.code)
                self.span.set_status(Status(StatusCode.ERROR, error.message))
            self.span.end()


NO_HOP = Hop(INVALID_SPAN, "")


def current_traceparent() -> str:
    """The current span as a header, or "" when there is none."""
    context = trace.get_current_span().get_span_context()
    return _traceparent(context) if context.is_valid else ""


def _traceparent(context: SpanContext) -> str:
    flags = int(context.trace_flags)
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"


def send_hop(operation: str, template: str, request_id: str) -> Hop:
    """Begin the span of an outgoing message, below whatever span is current."""
    span = _tracer.start_span(
        f"{operation} {template}",
        kind=SpanKind.PRODUCER,
        attributes={
            "messaging.system": "nats",
            "messaging.operation.name": operation,
            "messaging.operation.type": "send",
            "messaging.destination.template": template,
            "messaging.message.conversation_id": request_id,
        },
    )
    context = span.get_span_context()
    if context.is_valid:
        return Hop(span, f"{context.trace_id:032x}", _traceparent(context))
    trace_id = os.urandom(16).hex()
    return Hop(span, trace_id, f"00-{trace_id}-{os.urandom(8).hex()}-00")


def process_hop(
    template: str,
    subject: str,
    request_id: str,
    traceparent: str,
    *,
    project: str = "",
    link: bool = False,
) -> Hop:
    """Begin the span of an incoming message and make it current in this task's context.

    The sender's span is the parent, because on call one wants one tree per request; `link` adds the
    link that the messaging conventions ask for where a message may be processed more than once.
    """
    remote = parse_traceparent(traceparent)
    context = otel_context.Context()
    if remote is not None:
        context = trace.set_span_in_context(NonRecordingSpan(remote), context)
    span = _tracer.start_span(
        f"process {template}",
        context=context,
        kind=SpanKind.CONSUMER,
        links=[Link(remote)] if link and remote is not None else None,
        attributes={
            "messaging.system": "nats",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.template": template,
            "messaging.destination.name": subject,
            "messaging.message.conversation_id": request_id,
        },
    )
    if project:
        span.set_attribute("dsec.project", project)
    otel_context.attach(trace.set_span_in_context(span, context))
    own = span.get_span_context()
    trace_id = f"{own.trace_id:032x}" if own.is_valid else ""
    return Hop(span, trace_id)


def parse_traceparent(text: str) -> SpanContext | None:
    """The sender's span, or None when the header is missing or not of version 00's form."""
    parts = text.split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    try:
        ids = int(parts[1], 16), int(parts[2], 16)
        flags = TraceFlags(int(parts[3], 16) & TraceFlags.SAMPLED)
    except ValueError:
        return None
    context = SpanContext(ids[0], ids[1], is_remote=True, trace_flags=flags)
    return context if context.is_valid else None
