"""What `nats service ls`, `info` and `stats` see of a service.

The client library's own endpoints run one request at a time and return the text of exceptions to
the caller, so nothing is served through them: this only answers for the bus's subscriptions.
"""

from __future__ import annotations

import re

from nats.micro.service import (
    EndpointInfo,
    EndpointStats,
    Service,
    ServiceConfig,
    ServiceInfo,
    ServiceStats,
)

from libdsec.bus import Bus, Serving

_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_-]+")


class Discovery(Service):
    """Answers `$SRV.PING`, `INFO` and `STATS`. Lifecycle: start → stop with the connection."""

    def __init__(self, bus: Bus, config: ServiceConfig) -> None:
        super().__init__(bus.nats, config)
        self._bus = bus

    def info(self) -> ServiceInfo:
        info: ServiceInfo = super().info()
        info.endpoints = [
            EndpointInfo(
                name=_name(serving), subject=serving.subject, queue_group=serving.queue, metadata={}
            )
            for serving in self._bus.servings
        ]
        return info

    def stats(self) -> ServiceStats:
        stats: ServiceStats = super().stats()
        stats.endpoints = [_stats(serving) for serving in self._bus.servings]
        return stats


def _stats(serving: Serving) -> EndpointStats:
    tally = serving.tally
    busy_ns = int(tally.busy_s * 1e9)
    return EndpointStats(
        name=_name(serving),
        subject=serving.subject,
        queue_group=serving.queue,
        num_requests=tally.requests,
        num_errors=tally.failures + tally.refused,
        last_error=tally.last_error,
        processing_time=busy_ns,
        average_processing_time=busy_ns // tally.requests if tally.requests else 0,
    )


def _name(serving: Serving) -> str:
    return _NOT_A_NAME.sub("_", serving.template)
