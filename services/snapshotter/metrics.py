"""What a snapshotter counts: `dsec_snapshotter_*`, never by sandbox."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from libdsec.wire.snapshot import Frozen, Thawed

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class PauseMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"dsec_snapshotter_{name}_seconds", text, registry=registry,
                             buckets=_SECONDS)  # fmt: skip

        self._freeze = seconds("freeze", "until every task stood still")
        self._reclaim = seconds("reclaim", "taking memory back from frozen sandboxes")
        self._prefetch = seconds("prefetch", "asking for swapped pages before a thaw")
        self._pauses = Counter(
            "dsec_snapshotter_pauses_total", "pauses by outcome", ("outcome",), registry=registry
        )
        self._bytes = Counter(
            "dsec_snapshotter_reclaimed_bytes_total", "memory taken back, by what it held",
            ("pages",), registry=registry,
        )  # fmt: skip
        self._swapped = Counter(
            "dsec_snapshotter_swapped_bytes_total", "of it, what went to swap", registry=registry
        )

    def froze(self, frozen: Frozen) -> None:
        self._pauses.labels("partial" if frozen.partial else "ok").inc()
        self._freeze.observe(frozen.frozen_ms / 1000)
        self._reclaim.observe(frozen.reclaim_ms / 1000)
        # Counters never fall: a sandbox may have taken memory while it was being frozen.
        self._bytes.labels("anon").inc(max(0, frozen.anon_bytes))
        self._bytes.labels("file").inc(max(0, frozen.file_bytes))
        self._swapped.inc(max(0, frozen.swapped_bytes))

    def refused(self, outcome: str) -> None:
        self._pauses.labels(outcome).inc()

    def thawed(self, thawed: Thawed) -> None:
        self._prefetch.observe(thawed.prefetch_ms / 1000)
