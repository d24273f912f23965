"""Logs: one JSON object per line on standard error, with the trace and the request it belongs to.

Whatever logs through the standard library (NATS, the bus) comes out the same way.
"""

from __future__ import annotations

import logging
import sys

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, Processor, WrappedLogger

from libdsec.bus import current_call


def configure_logging(service: str, instance: str, node: str, *, level: str, fmt: str) -> None:
    """Set up the process's logging; to be called once."""
    identity = {"service": service, "instance": instance} | ({"node": node} if node else {})

    def identify(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {**event, **identity}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _correlate,
        identify,
    ]
    last: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        if fmt == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _correlate(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Add what `dsec trace` and `dsec logs` look for; what the caller has said itself wins."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event.setdefault("trace_id", f"{context.trace_id:032x}")
        event.setdefault("span_id", f"{context.span_id:016x}")
    call = current_call()
    if call is not None:
        event.setdefault("request_id", call.request_id)
        if call.project:
            event.setdefault("project", call.project)
    return event
