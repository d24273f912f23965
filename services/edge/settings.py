"""What an edge is told from outside: DSEC_* variables, with those that every service has."""

from __future__ import annotations

import os
from ipaddress import IPv4Network
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from ..chassis.settings import ServiceSettings
from .admission import OperatingPoint
from .fault import faults

_CHECKOUT = Path(__file__).resolve().parents[2] / "build"
_INSTALLED = Path("/usr/lib/dsec")


def built(name: str) -> Path:
    """Where a program that was built from C is: beside the sources, or where a package puts it."""
    return _CHECKOUT / name if (_CHECKOUT / name).exists() else _INSTALLED / name


class EdgeSettings(ServiceSettings):
    """Settings of one node's edge."""

    state_dir: Path = Field(
        Path("/var/lib/dsec"), description="journal, disks, sandboxes; survives a reboot"
    )
    run_dir: Path = Field(
        Path("/run/dsec"), description="sockets, bundles, the pinned namespace; short path"
    )
    layer_store: Path = Field(
        Path("/var/lib/dsec/layers"), description="images by digest; nodes may share it"
    )
    publish: bool = Field(False, description="this edge builds and publishes layers")
    layer_idle_grace_s: float = Field(
        600.0, ge=0, description="an unused layer stays mounted this long"
    )

    crun: Path = Field(Path("/usr/bin/crun"), description="the container runtime")
    launcher: Path = Field(built("dsec-launch"), description="runs before crun")
    agent: Path = Field(built("aether"), description="static binary of the agent")

    addresses: IPv4Network | None = Field(
        None, description="range for sandboxes' addresses, this node's alone; empty: no network"
    )
    nameservers: tuple[str, ...] = Field((), description="for sandboxes' resolv.conf")
    disk_pool: int = Field(64, ge=0, description="writable disks kept ready, of each size")
    link_pool: int = Field(16, ge=0, description="network links kept ready")

    public_publishers: tuple[str, ...] = Field(
        ("public",), description="projects that may publish layers for everybody"
    )
    parallel_starts: int = Field(0, ge=0, description="sandboxes starting at once; 0: 2 a core")
    step_timeout_s: float = Field(20.0, gt=0, description="one blocking step of a start or stop")
    operating_point: OperatingPoint = Field(
        OperatingPoint(), description="how full this node may get; JSON, or one variable each"
    )
    capacity_share: float = Field(
        1.0, gt=0, le=1, description="part of this host that is this node's; others have the rest"
    )
    pool: str = Field("local", description="local, or the name of a burst pool")
    fault: str = Field("", description="dies at a point, for tests: <point>:kill|exit[:n]")

    @model_validator(mode="after")
    def _check_node(self) -> Self:
        if not self.node:
            raise ValueError("DSEC_NODE is empty: an edge is one node's")
        faults(self.fault)
        return self

    @property
    def starts_at_once(self) -> int:
        return self.parallel_starts or 2 * (os.cpu_count() or 1)

    @property
    def point(self) -> OperatingPoint:
        """The operating point of this node's share of its host."""
        return self.operating_point.shared(self.capacity_share)
