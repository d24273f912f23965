"""Where the time of a create went: one span and one number per phase, from one measurement."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace

_tracer = trace.get_tracer("dsec.edge")


class Phases:
    """The phases of one create. Those that run side by side each count their own duration."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with _tracer.start_as_current_span(name):
            try:
                yield
            finally:
                self.ms[name] = round((time.perf_counter() - began) * 1000, 3)


def record_span(name: str, started_mono_ns: int, ended_mono_ns: int, **attributes: str) -> None:
    """A span somebody else measured on CLOCK_MONOTONIC, which all processes of a host share."""
    to_wall = time.time_ns() - time.monotonic_ns()
    opened = _tracer.start_span(name, start_time=started_mono_ns + to_wall, attributes=attributes)
    opened.end(ended_mono_ns + to_wall)
