"""Composition of a burst service."""

from __future__ import annotations

from pathlib import Path

from libdsec.errors import InvalidArgument
from libdsec.wire import subjects

from ..chassis.run import run
from ..chassis.service import Service
from .eligibility import CloudRules
from .handlers import Burst
from .metrics import BurstMetrics
from .settings import BurstSettings
from .utilisation import Hysteresis


async def setup(service: Service[BurstSettings]) -> None:
    settings = service.settings
    burst = Burst(
        rules=CloudRules(read_digests(settings.burst_synced_file), settings.burst_projects),
        switch=Hysteresis(settings.burst_start, settings.burst_stop),
        enabled=settings.burst_enabled,
        pool=settings.burst_pool,
        now_s=service.clock.monotonic_s,
        metrics=BurstMetrics(service.metrics.registry),
    )
    await service.bus.subscribe(subjects.HEARTBEAT, burst.on_heartbeat, concurrency=1)
    await service.bus.serve(subjects.BURST_ASK, burst.ask, queue=subjects.Q_BURST)
    await service.bus.serve(subjects.BURST_STATUS, burst.status, queue=subjects.Q_BURST)


def read_digests(path: Path | None) -> frozenset[str]:
    """The layers the cloud has.

    Raises:
        InvalidArgument: naming the file that cannot be read.
    """
    if path is None:
        return frozenset()
    try:
        return frozenset(line.strip() for line in path.read_text().splitlines() if line.strip())
    except OSError as err:
        raise InvalidArgument(f"burst_synced_file {path} cannot be read: {err.strerror}") from err


if __name__ == "__main__":
    run("burst", BurstSettings, setup)
