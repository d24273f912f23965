"""One Prometheus registry per service, and the metrics of the bus that all services have.

Names follow Prometheus: prefix `dsec_`, base units, `_total`. Labels are templates, outcomes and
reasons, never ids of sandboxes, jobs or requests: a scrape holds the interpreter's lock.
"""

from __future__ import annotations

import functools

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from libdsec.bus import BusObserver

from .consumer import ConsumerObserver
from .delivery import Outcome
from .version import version

# From a fast exec to a create that waited in a full queue; the library's own stop at 10 s.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 180, 600,
)  # fmt: skip


class ServiceMetrics:
    """The registry that /metrics shows. A service adds its own metrics to `registry`."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        build = Gauge(
            "dsec_build_info", "What runs here", ["service", "version"], registry=self.registry
        )
        build.labels(service, version()).set(1)
        self.loop_lag = Gauge(
            "dsec_event_loop_lag_seconds", "How late the loop ran last", registry=self.registry
        )
        self.spans_dropped = Counter(
            "dsec_trace_spans_dropped_total",
            "Finished spans forgotten before anybody asked for them or exported them",
            ["where"],
            registry=self.registry,
        )
        self.bus = BusMetrics(self.registry)
        self.consumer = ConsumerMetrics(self.registry)


class BusMetrics(BusObserver):
    """Counts what the bus sees."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._messages = Counter(
            "dsec_bus_messages_total",
            "Messages by template, direction and outcome",
            ["subject_template", "direction", "outcome"],
            registry=registry,
        )
        self._handlers = Histogram(
            "dsec_bus_handler_duration_seconds",
            "How long handlers took",
            ["subject_template"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._dropped = Counter(
            "dsec_bus_dropped_total",
            "Messages thrown away",
            ["subject_template", "reason"],
            registry=registry,
        )
        self._reconnects = Counter(
            "dsec_bus_reconnects_total", "Times the connection came back", registry=registry
        )
        self._slow = Counter(
            "dsec_bus_slow_consumer_total", "Messages dropped by a full queue", registry=registry
        )
        self._denied = Counter(
            "dsec_bus_denied_total", "What the server refused", ["operation"], registry=registry
        )
        self._up = Gauge("dsec_bus_connected", "1 while connected", registry=registry)
        self._connections = 0
        # Children are looked up once: labels() costs more than counting.
        self._sent_child = functools.cache(lambda t, o: self._messages.labels(t, "sent", o))
        self._handled_child = functools.cache(lambda t, o: self._messages.labels(t, "handled", o))
        self._handler_child = functools.cache(self._handlers.labels)

    def connected(self) -> None:
        self._up.set(1)
        if self._connections:
            self._reconnects.inc()
        self._connections += 1

    def disconnected(self) -> None:
        self._up.set(0)

    def sent(self, template: str, outcome: str, duration_s: float) -> None:
        self._sent_child(template, outcome).inc()

    def handled(self, template: str, outcome: str, duration_s: float) -> None:
        self._handled_child(template, outcome).inc()
        self._handler_child(template).observe(duration_s)

    def dropped(self, template: str, reason: str) -> None:
        self._dropped.labels(template, reason).inc()

    def slow_consumer(self, subject: str) -> None:
        self._slow.inc()

    def denied(self, operation: str, subject: str) -> None:
        self._denied.labels(operation).inc()


class ConsumerMetrics(ConsumerObserver):
    """Counts what consumers settle."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._settled = Counter(
            "dsec_bus_deliveries_total",
            "Deliveries by consumer and outcome",
            ["durable", "outcome"],
            registry=registry,
        )
        self._redelivered = Counter(
            "dsec_bus_redeliveries_total",
            "Messages that came again",
            ["durable"],
            registry=registry,
        )
        self._dead = Counter(
            "dsec_bus_dlq_messages_total",
            "Messages that became dead letters",
            ["durable"],
            registry=registry,
        )
        self._duration = Histogram(
            "dsec_bus_delivery_duration_seconds",
            "From the start of handling to the outcome",
            ["durable"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )

    def settled(self, durable: str, outcome: Outcome, duration_s: float) -> None:
        self._settled.labels(durable, outcome.value).inc()
        self._duration.labels(durable).observe(duration_s)
        if outcome is Outcome.DEAD:
            self._dead.labels(durable).inc()

    def redelivered(self, durable: str) -> None:
        self._redelivered.labels(durable).inc()
