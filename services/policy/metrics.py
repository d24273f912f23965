"""What a policy service counts: `dsec_policy_*`, never by sandbox."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


class PolicyMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._applied = Counter(
            "dsec_policy_applied_total", "policies put in force, by network", ("network",),
            registry=registry,
        )  # fmt: skip
        self._refused = Counter(
            "dsec_policy_refused_total", "policies refused, by error", ("code",), registry=registry
        )
        self._seconds = Histogram(
            "dsec_policy_apply_seconds", "compiling a policy and handing it to the kernel",
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self._flows = Counter(
            "dsec_policy_flows_total", "flows that a change denied: ended, or left to stall",
            ("outcome",), registry=registry,
        )  # fmt: skip

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is asked when somebody looks."""
        Gauge(f"dsec_policy_{name}", text, registry=self._registry).set_function(value)

    def applied(self, network: str, duration_s: float) -> None:
        self._applied.labels(network).inc()
        self._seconds.observe(duration_s)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def flows(self, *, ended: int, stalled: int) -> None:
        self._flows.labels("ended").inc(ended)
        self._flows.labels("stalled").inc(stalled)
