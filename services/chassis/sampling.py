"""Which spans are recorded and which are exported.

Everything is recorded, because `dsec trace` answers for every request out of memory. What is also
*sampled*, that is exported, is decided by the trace id, so that all processes agree without asking:
the caller's own decision is honoured, and a share of the rest is added.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

_LOW_64_BITS = (1 << 64) - 1


class RecordAll(Sampler):
    """Records every span; samples those of sampled parents and of `ratio` of all traces."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._bound = round(ratio * (1 << 64))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        parent = get_current_span(parent_context).get_span_context()
        sampled = (trace_id & _LOW_64_BITS) < self._bound or (
            parent.is_valid and parent.trace_flags.sampled
        )
        decision = Decision.RECORD_AND_SAMPLE if sampled else Decision.RECORD_ONLY
        return SamplingResult(decision, attributes)

    def get_description(self) -> str:
        return f"RecordAll{{{self._ratio}}}"
