"""Tracing of one process: everything recorded and kept in memory, a part of it exported.

`dsec trace` asks all processes for a trace or a request; each answers from its ring. With an OTLP
endpoint in the standard OTEL_* variables, sampled, failed and slow traces are also sent there.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider

from libdsec.bus import Bus, Call, Serving
from libdsec.wire import subjects
from libdsec.wire.trace import SpanRecord, Spans, TraceQuery

from .metrics import ServiceMetrics
from .sampling import RecordAll
from .settings import ServiceSettings, has_otlp_endpoint
from .span_export import SpanExport
from .span_ring import SpanRing
from .version import version

_ANSWER_SPANS = 1000  # at most, so that an answer fits into a message
_PROJECT = "dsec.project"


class Telemetry:
    """Lifecycle: start → serve (answers traces) → shutdown (sends what waits)."""

    def __init__(
        self, service: str, instance: str, ring: SpanRing, export: SpanExport | None
    ) -> None:
        self.ring = ring
        self._service = service
        self._instance = instance
        self._export = export

    @classmethod
    def start(cls, service: str, settings: ServiceSettings, metrics: ServiceMetrics) -> Telemetry:
        """Make this process's spans real, once and for all its tracers."""
        in_ring = metrics.spans_dropped.labels("ring")
        in_export = metrics.spans_dropped.labels("export")
        ring = SpanRing(settings.span_ring_size, service, settings.node, on_drop=in_ring.inc)
        resource = _resource(service, settings)
        provider = TracerProvider(
            sampler=RecordAll(settings.trace_sample_ratio),
            resource=resource,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(ring)
        export = None
        if has_otlp_endpoint():
            # Imported here: a tenth of a service's start, for nothing without a collector.
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            export = SpanExport(
                OTLPSpanExporter(),
                ring,
                resource,
                slow_s=settings.trace_slow_s,
                on_drop=in_export.inc,
            )
            provider.add_span_processor(export)
        trace.set_tracer_provider(provider)
        return cls(service, settings.instance, ring, export)

    async def serve(self, bus: Bus) -> Serving:
        """Answer `dsec trace`; every process does, so there is no queue group."""
        return await bus.serve(subjects.TRACE, self.find, concurrency=4, backlog=32)

    async def find(self, query: TraceQuery, call: Call) -> Spans:
        """The spans of a trace or request, without those that say they are another project's."""
        if query.trace_id:
            found = self.ring.of_trace(query.trace_id)
        else:
            found = self.ring.of_request(query.request_id)
        visible = [span for span in found if _visible(span, call.project)]
        return Spans(
            service=self._service,
            instance=self._instance,
            spans=tuple(visible[:_ANSWER_SPANS]),
            dropped=self.ring.dropped + max(0, len(visible) - _ANSWER_SPANS),
        )

    def shutdown(self) -> None:
        if self._export is not None:
            self._export.shutdown()


def _visible(span: SpanRecord, project: str) -> bool:
    return span.attributes.get(_PROJECT, project) == project


def _resource(service: str, settings: ServiceSettings) -> Resource:
    attributes = {
        "service.namespace": "dsec",
        "service.name": service,
        "service.version": version(),
        "service.instance.id": settings.instance,
    }
    return Resource.create(attributes | ({"dsec.node.id": settings.node} if settings.node else {}))
