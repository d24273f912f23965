"""How the node is, measured: memory, pressure, disk, pids; and what its table adds to that.

Measurements are kept for MAX_AGE_S, since a burst of offers asks hundreds of times a second; what
is being created meanwhile is counted from the table and is never stale.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from libdsec.wire.sandbox import State
from libhost.memory import read_pressure

from ..chassis.clock import Clock
from .admission import NodeFacts
from .peers import Freshness
from .sandbox import Sandbox
from .switches import Switches

MAX_AGE_S: Final = 0.25
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Measured:
    total_memory_mib: int
    available_memory_mib: int
    memory_pressure: float
    total_disk_mib: int
    free_disk_mib: int
    free_pids: int


def measure(state_dir: Path, share: float = 1.0) -> Measured:
    """`share` of what the host has: the rest is other nodes'."""
    memory = psutil.virtual_memory()
    disk = psutil.disk_usage(str(state_dir))
    return Measured(
        total_memory_mib=int(memory.total * share) // _MIB,
        available_memory_mib=int(memory.available * share) // _MIB,
        memory_pressure=_pressure(),
        total_disk_mib=int(disk.total * share) // _MIB,
        free_disk_mib=int(disk.free * share) // _MIB,
        free_pids=int(_free_pids() * share),
    )


def _pressure() -> float:
    try:
        return read_pressure(Path("/proc/pressure/memory")).some_avg10
    except OSError:
        return 0.0  # a kernel without PSI: free memory alone decides


def _free_pids() -> int:
    limits = (Path("/proc/sys/kernel") / name for name in ("pid_max", "threads-max"))
    threads = Path("/proc/loadavg").read_text().split()[3].partition("/")[2]
    return min(int(limit.read_text()) for limit in limits) - int(threads)


class Facts:
    """The node's facts as admission takes them."""

    def __init__(
        self,
        state_dir: Path,
        clock: Clock,
        policy: Freshness,
        switches: Switches,
        share: float,
    ) -> None:
        self._state_dir = state_dir
        self._clock = clock
        self._policy = policy
        self._switches = switches
        self._share = share
        self._cores = (psutil.cpu_count() or 1) * share
        self._measured = measure(state_dir, share)
        self._measured_at = clock.monotonic_s()

    @property
    def cores(self) -> float:
        return self._cores

    def measured(self) -> Measured:
        now = self._clock.monotonic_s()
        if now - self._measured_at > MAX_AGE_S:
            self._measured, self._measured_at = measure(self._state_dir, self._share), now
        return self._measured

    def read(self, sandboxes: Iterable[Sandbox]) -> NodeFacts:
        measured = self.measured()
        alive = tuple(sandboxes)
        creating = [s for s in alive if s.status.state is State.ACCEPTED]
        return NodeFacts(
            available_memory_mib=measured.available_memory_mib,
            memory_pressure=measured.memory_pressure,
            free_disk_mib=measured.free_disk_mib,
            free_pids=measured.free_pids,
            cores=self._cores,
            sandboxes=len(alive),
            creating=len(creating),
            creating_memory_mib=sum(s.origin.spec.resources.memory_mib for s in creating),
            committed_ls_cpus=sum(s.committed_ls_cpus for s in alive),
            policy_ready=self._policy.ready,
            policy_reason=self._policy.reason,
            cordoned=self._switches.cordoned,
            draining=self._switches.draining or self._switches.leaving,
        )
