"""What an operator can choose for a snapshotter, all of it `DSEC_*` variables."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from ..chassis.settings import ServiceSettings


class SnapshotterSettings(ServiceSettings):
    """The node is the one whose sandboxes' cgroups this worker may touch."""

    state_dir: Path = Field(Path("/var/lib/dsec"), description="the node's persistent directory")
    run_dir: Path = Field(Path("/run/dsec"), description="the node's volatile directory")
    parallel_pauses: int = Field(8, ge=1, le=256, description="sandboxes worked on at once")
    health_interval_s: float = Field(1.0, gt=0, description="between two reports of being well")

    @model_validator(mode="after")
    def _check_node(self) -> Self:
        if not self.node:
            raise ValueError("DSEC_NODE is empty: a snapshotter belongs to one node")
        return self
