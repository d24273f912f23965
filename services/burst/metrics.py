"""What the burst service counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class BurstMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.utilisation = Gauge(
            "dsec_burst_local_utilisation_ratio",
            "Mean load of the healthy local nodes, 1 being their operating point",
            registry=registry,
        )
        self.answers = Counter(
            "dsec_burst_answers_total",
            "Requests asked about, by the furthest pool they may be placed in",
            ["pool"],
            registry=registry,
        )
