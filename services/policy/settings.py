"""What an operator can choose for a policy service, all of it `DSEC_*` variables."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from libhost.bpf.table import OBJECT

from ..chassis.settings import ServiceSettings


class PolicySettings(ServiceSettings):
    """The node is the one whose sandboxes this service polices; there is one per node."""

    state_dir: Path = Field(Path("/var/lib/dsec"), description="the node's persistent directory")
    run_dir: Path = Field(Path("/run/dsec"), description="the node's volatile directory")
    alias_file: Path = Field(
        Path("/etc/dsec/aliases.toml"), description="what service aliases stand for on this node"
    )
    bpf_object: Path = Field(OBJECT, description="the compiled network policy")
    retry_open_s: float = Field(
        30.0, gt=0, description="whom the kernel refused ends after this long, for the next to try"
    )
    health_interval_s: float = Field(1.0, gt=0, description="between two reports of being well")

    @model_validator(mode="after")
    def _check_node(self) -> Self:
        if not self.node:
            raise ValueError("DSEC_NODE is empty: a policy service belongs to one node")
        return self
