"""The edge's own numbers on /metrics. Never labelled by sandbox, job or image."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from libdsec.wire.sandbox import State

from .journal import Journal
from .placement import Ledger
from .sandbox import Sandbox
from .table import Table

_PHASE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class EdgeMetrics:
    """observe() sees every change of a sandbox's state."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._phases = Histogram(
            "dsec_edge_create_phase_seconds",
            "time of a create by phase",
            ["phase"],
            buckets=_PHASE_BUCKETS,
            registry=registry,
        )
        self._deaths = Counter(
            "dsec_edge_deaths", "sandboxes that ended, by reason", ["reason"], registry=registry
        )
        self.reclaimed = Counter(
            "dsec_edge_reclaimed", "leftovers removed, by place", ["place"], registry=registry
        )

    def observe(self, sandbox: Sandbox, state: State, reason: str) -> None:
        if state is State.DEAD:
            self._deaths.labels(reason).inc()
        elif state is State.READY and not reason:
            for phase, spent_ms in sandbox.status.phases_ms.items():
                self._phases.labels(phase).observe(spent_ms / 1000)

    def count_reclaimed(self, places: Tally[str]) -> None:
        for place, count in places.items():
            self.reclaimed.labels(place).inc(count)


class StateCollector(Collector):
    """What is counted when somebody looks."""

    def __init__(self, table: Table, ledger: Ledger, journal: Journal) -> None:
        self._table = table
        self._ledger = ledger
        self._journal = journal

    def collect(self) -> Iterator[GaugeMetricFamily]:
        states = Tally(s.status.state.value for s in self._table)
        sandboxes = GaugeMetricFamily("dsec_edge_sandboxes", "by state", labels=["state"])
        for state in State:
            sandboxes.add_metric([state.value], states[state.value])
        yield sandboxes
        yield GaugeMetricFamily(
            "dsec_edge_unannounced", "accepted, not announced", self._ledger.unannounced
        )
        yield GaugeMetricFamily(
            "dsec_edge_journal_bytes", "size of the journal", self._journal.size_bytes
        )
        yield GaugeMetricFamily(
            "dsec_edge_journal_quarantined", "damaged entries", self._journal.quarantined
        )
