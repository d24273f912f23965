"""What one sandbox uses, as its kernel counters say."""

from __future__ import annotations

from libdsec.errors import DeathReason, SandboxDead
from libdsec.wire.sandbox import SandboxMetrics
from libhost.disk import Disk

from .sandbox import Sandbox


def read_usage(disk: Disk, sandbox: Sandbox) -> SandboxMetrics:
    """Blocking."""
    cgroup = sandbox.holding.cgroup
    if cgroup is None:
        raise SandboxDead(f"sandbox {sandbox.id} is gone", reason=DeathReason.KILLED)
    stats = cgroup.stats()
    used = disk.usage(sandbox.holding.sandbox)
    return SandboxMetrics(
        cpu_usage_s=stats.cpu_usage_us / 1e6,
        memory_bytes=stats.memory.current_bytes,
        memory_limit_bytes=sandbox.origin.spec.resources.memory_mib << 20,
        swap_bytes=stats.memory.swap_bytes,
        disk_bytes=used.used_bytes,
        disk_limit_bytes=used.limit_bytes,
        processes=stats.pids_current,
        oom_kills=stats.memory.oom_kills,
    )
