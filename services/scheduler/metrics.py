"""What a scheduler counts. Labels are outcomes, filters and states, never ids."""

from __future__ import annotations

import functools
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libdsec.wire.node import NodeState

from ..chassis.metrics import LATENCY_BUCKETS


class SchedulerMetrics:
    """Registered once per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "dsec_scheduler_requests_total", "Deliveries by outcome", ["outcome"], registry=registry
        )
        self.placements = Counter(
            "dsec_scheduler_placements_total", "Items accepted by edges", registry=registry
        )
        self.offers = Counter(
            "dsec_scheduler_offers_total", "Offers by outcome", ["outcome"], registry=registry
        )
        self.dropped = Counter(
            "dsec_scheduler_candidates_rejected_total",
            "Nodes that a filter dropped when a request could not be placed",
            ["reason"],
            registry=registry,
        )
        self.duration = Histogram(
            "dsec_scheduler_placement_duration_seconds",
            "From a delivery to its outcome",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.queued = Histogram(
            "dsec_scheduler_queued_seconds",
            "From the publish of a request to the delivery that placed it",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.lost_frozen = Gauge(
            "dsec_scheduler_lost_declarations_frozen",
            "1 while too many nodes fell silent together to believe it",
            registry=registry,
        )
        self._registry = registry

    def watch_view(self, age_s: Callable[[], float], count: Callable[[NodeState], int]) -> None:
        """Gauges computed when somebody looks."""
        age = Gauge(
            "dsec_scheduler_view_age_seconds", "Since the last read", registry=self._registry
        )
        age.set_function(age_s)
        nodes = Gauge("dsec_scheduler_nodes", "Nodes by state", ["state"], registry=self._registry)
        for state in NodeState:
            nodes.labels(state.value).set_function(functools.partial(count, state))


class WatcherMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.heartbeats = Counter(
            "dsec_watcher_heartbeats_total", "Heartbeats heard", registry=registry
        )
        self.writing = Gauge(
            "dsec_watcher_writing", "1 while Redis takes the view", registry=registry
        )
