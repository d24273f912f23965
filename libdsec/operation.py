"""One call of the client's surface: its request id, its trace, its root span.

The trace belongs to the caller's when there is one. Without an OpenTelemetry SDK the span's ids are
made here, so that one create or one exec is still one trace everywhere, and every error names both
ids. The finished span is handed to a reporter, since a client has nowhere to keep it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags

from .errors import DSecError
from .wire.model import random_token
from .wire.trace import SpanRecord

Report = Callable[[str, SpanRecord], None]

_tracer = trace.get_tracer("libdsec")


@dataclass
class Operation:
    """What is known of a call while it runs. `node` is who gets its span; "" is nobody yet."""

    name: str
    request_id: str
    span: Span
    parent_id: str
    node: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    start_ns: int = field(default_factory=time.time_ns)

    @property
    def trace_id(self) -> str:
        return f"{self.span.get_span_context().trace_id:032x}"

    @contextmanager
    def current(self) -> Iterator[None]:
        """Messages sent inside belong to this call."""
        token = otel_context.attach(trace.set_span_in_context(self.span))
        try:
            yield
        finally:
            otel_context.detach(token)

    def identify(self, err: DSecError) -> None:
        """Give an error the ids by which the call is found in DSec's traces and logs."""
        err.request_id = err.request_id or self.request_id
        err.trace_id = err.trace_id or self.trace_id

    def record(self, error: str) -> SpanRecord:
        context = self.span.get_span_context()
        return SpanRecord(
            trace_id=self.trace_id,
            span_id=f"{context.span_id:016x}",
            parent_id=self.parent_id,
            name=self.name,
            service="libdsec",
            start_ns=self.start_ns,
            end_ns=time.time_ns(),
            error=error,
            attributes={
                "messaging.message.conversation_id": self.request_id,
                **self.attributes,
            },
        )


@contextmanager
def operation(name: str, report: Report, *, node: str = "", current: bool = True,
              request_id: str = "") -> Iterator[Operation]:  # fmt: skip
    """Run a call: errors leave with its ids, its span is ended and reported.

    Args:
        current: off for generators, whose caller runs between two of their steps; they wrap what
            they send in `Operation.current()` instead.
    """
    op = _begin(name, request_id or random_token(), node)
    failure: BaseException | None = None
    try:
        if current:
            with op.current():
                yield op
        else:
            yield op
    except BaseException as err:
        failure = err
        if isinstance(err, DSecError):
            op.identify(err)
        raise
    finally:
        _end(op, failure, report)


def _begin(name: str, request_id: str, node: str) -> Operation:
    parent = trace.get_current_span().get_span_context()
    span = _tracer.start_span(
        f"dsec {name}", attributes={"messaging.message.conversation_id": request_id}
    )
    if not span.is_recording():  # no SDK, or it does not sample this one
        span = NonRecordingSpan(
            SpanContext(
                trace_id=parent.trace_id if parent.is_valid else _random_id(16),
                span_id=_random_id(8),
                is_remote=False,
                trace_flags=parent.trace_flags if parent.is_valid else TraceFlags(0),
            )
        )
    parent_id = f"{parent.span_id:016x}" if parent.is_valid else ""
    return Operation(name, request_id, span, parent_id, node)


def _end(op: Operation, failure: BaseException | None, report: Report) -> None:
    error = ""
    if failure is not None:
        error = failure.code if isinstance(failure, DSecError) else type(failure).__name__
        op.span.set_attribute("error.type", error)
        op.span.set_status(Status(StatusCode.ERROR, error))
    op.span.end()
    if op.node:
        report(op.node, op.record(error))


def _random_id(nbytes: int) -> int:
    return int.from_bytes(os.urandom(nbytes)) or 1
