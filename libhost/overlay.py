"""A sandbox's root: an overlay of read-only layers and one writable directory.

:func:`plan_overlay` is pure and yields the operations in order; :func:`apply` carries them out and
returns a detached mount: the root appears in no mount table of the node, so a killed edge leaves
none behind. At most 500 layers (the kernel's limit).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from libhost.disk import WritableLayer
from libhost.layer import MountedLayer

MAX_LOWERS = 500


class OverlayMode(StrEnum):
    """How a layer is named to the kernel, best first; which one works is probed."""

    SET_FD = "set_fd"
    PROC_FD = "proc_fd"
    PATHS = "paths"


@dataclass(frozen=True)
class OverlayOp:
    """One operation of a plan (subclasses: SetFlag, SetString, SetFd)."""

    key: str

    def describe(self) -> str:
        raise NotImplementedError


def plan_overlay(
    lowers: Sequence[MountedLayer], writable: WritableLayer, mode: OverlayMode
) -> tuple[OverlayOp, ...]:
    """``lowers`` from the bottom (base) to the top (last toolkit)."""
    raise NotImplementedError


def apply(plan: Sequence[OverlayOp]) -> int:
    """Mount; returns the detached mount's descriptor (close it after the container started)."""
    raise NotImplementedError
