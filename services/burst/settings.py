"""What an operator can choose for the burst service, all of it `DSEC_*` variables."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from ..chassis.settings import ServiceSettings


class BurstSettings(ServiceSettings):
    """Utilisation is the mean load of the healthy local nodes, 1.0 being their operating point."""

    burst_enabled: bool = Field(True, description="whether anything may go to the cloud at all")
    burst_start: float = Field(0.80, gt=0, le=1, description="utilisation at which it begins")
    burst_stop: float = Field(0.70, ge=0, lt=1, description="utilisation at which it ends")
    burst_pool: str = Field("cloud", description="pool of the nodes in the cloud")
    burst_projects: tuple[str, ...] = Field((), description="projects that allow it; empty: all")
    burst_synced_file: Path | None = Field(
        None, description="digests of the layers in the cloud's store, one a line; empty: none"
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.burst_stop >= self.burst_start:
            raise ValueError(
                f"burst_stop {self.burst_stop} is not below burst_start {self.burst_start}"
            )
        return self
