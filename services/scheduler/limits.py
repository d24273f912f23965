"""Arguments that can never work, whatever the nodes: said at once, to whoever asked. Pure."""

from __future__ import annotations

from typing import Final

from libdsec.errors import DSecError, InvalidArgument
from libdsec.wire import defaults as d
from libdsec.wire.sandbox import SandboxSpec

_RANGES: Final[dict[str, tuple[float, float]]] = {
    "cpus": d.CPUS_RANGE,
    "memory_mib": d.MEMORY_MIB_RANGE,
    "disk_mib": d.DISK_MIB_RANGE,
    "max_files": d.MAX_FILES_RANGE,
    "shm_mib": d.SHM_MIB_RANGE,
    "pids": d.PIDS_RANGE,
}


def fault_of(spec: SandboxSpec) -> DSecError | None:
    """The first limit or bound that a spec does not keep."""
    for name, (least, most) in _RANGES.items():
        value = getattr(spec.resources, name)
        if not least <= value <= most:
            return InvalidArgument(
                f"{name}={value:g} is out of range", hint=f"it is {least:g} to {most:g}"
            )
    if len(spec.toolkits) > d.MAX_TOOLKITS:
        return InvalidArgument(f"{len(spec.toolkits)} toolkits are more than {d.MAX_TOOLKITS}")
    if len(spec.labels) > d.MAX_LABELS:
        return InvalidArgument(f"{len(spec.labels)} labels are more than {d.MAX_LABELS}")
    if spec.phase is not None and spec.phase not in spec.phases:
        known = ", ".join(sorted(spec.phases)) or "none"
        return InvalidArgument(f"there is no phase {spec.phase!r}", hint=f"there are: {known}")
    lifetime = spec.lifetime
    if min(lifetime.idle_timeout_s, lifetime.max_lifetime_s, lifetime.max_paused_s) <= 0:
        return InvalidArgument("idle_timeout_s, max_lifetime_s and max_paused_s are above 0")
    return None
