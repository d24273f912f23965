"""The control files of cgroups in their two dialects, v1 and v2. No tree, no names, no policy.

Values go through ``os.write``: Python's buffered files report a refused write only when the object
is destroyed, where it is lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

_PERIOD_US = 100_000
_MIB = 1 << 20
_RMDIR_PATIENCE_S = 2.0


@dataclass(frozen=True)
class CgroupLimits:
    """``cpus`` None: no quota, only the weight.

    ``swap_max_mib`` 0: nothing is swapped while it runs (a pause still may); None: as the host has.
    """

    memory_mib: int
    pids: int
    cpus: float | None = None
    cpu_weight: int = 100
    swap_max_mib: int | None = 0


@dataclass(frozen=True)
class MemoryStats:
    """``file_bytes`` is page cache without shared memory, which has a field of its own."""

    current_bytes: int
    peak_bytes: int
    anon_bytes: int
    file_bytes: int
    shmem_bytes: int
    swap_bytes: int
    oom_kills: int


def write_limits_v1(memory: Path, cpu: Path, limits: CgroupLimits) -> None:
    size = limits.memory_mib * _MIB
    write(memory / "memory.limit_in_bytes", str(size))
    memsw = memory / "memory.memsw.limit_in_bytes"
    if limits.swap_max_mib is not None and memsw.exists():
        write(memsw, str(size + limits.swap_max_mib * _MIB))
        if limits.swap_max_mib == 0:
            # The sum of memory and swap is what v1 limits: swapping out would still fit in it.
            write(memory / "memory.swappiness", "0")
    write_weight_v1(cpu, limits.cpu_weight)
    write(cpu / "cpu.cfs_quota_us", str(_quota_us(limits.cpus) or -1))


def write_limits_v2(memory: Path, cpu: Path, limits: CgroupLimits) -> None:
    write(memory / "memory.max", str(limits.memory_mib * _MIB))
    swap = memory / "memory.swap.max"
    if limits.swap_max_mib is not None and swap.exists():
        write(swap, str(limits.swap_max_mib * _MIB))
    write_weight_v2(cpu, limits.cpu_weight)
    write(cpu / "cpu.max", f"{_quota_us(limits.cpus) or 'max'} {_PERIOD_US}")


def write_weight_v1(cpu: Path, weight: int) -> None:
    """A weight of 100 is the default of v2, 1024 shares that of v1."""
    write(cpu / "cpu.shares", str(min(262_144, max(2, weight * 1024 // 100))))


def write_weight_v2(cpu: Path, weight: int) -> None:
    write(cpu / "cpu.weight", str(min(10_000, max(1, weight))))


def _quota_us(cpus: float | None) -> int | None:
    """The kernel takes no quota below 1 ms."""
    return None if cpus is None else max(1000, round(cpus * _PERIOD_US))


def memory_stats_v1(memory: Path) -> MemoryStats:
    stat = read_keys(memory / "memory.stat")
    return MemoryStats(
        current_bytes=read_int(memory / "memory.usage_in_bytes"),
        peak_bytes=read_int(memory / "memory.max_usage_in_bytes"),
        anon_bytes=stat["total_rss"],
        file_bytes=stat["total_cache"] - stat.get("total_shmem", 0),
        shmem_bytes=stat.get("total_shmem", 0),
        swap_bytes=stat.get("total_swap", 0),
        oom_kills=read_keys(memory / "memory.oom_control").get("oom_kill", 0),
    )


def memory_stats_v2(memory: Path) -> MemoryStats:
    stat = read_keys(memory / "memory.stat")
    current = read_int(memory / "memory.current")
    with contextlib.suppress(FileNotFoundError):  # memory.peak is of 5.19
        peak = read_int(memory / "memory.peak")
        return _stats_v2(memory, stat, current, peak)
    return _stats_v2(memory, stat, current, current)


def _stats_v2(memory: Path, stat: dict[str, int], current: int, peak: int) -> MemoryStats:
    swap = memory / "memory.swap.current"
    return MemoryStats(
        current_bytes=current,
        peak_bytes=peak,
        anon_bytes=stat["anon"],
        file_bytes=stat["file"] - stat["shmem"],
        shmem_bytes=stat["shmem"],
        swap_bytes=read_int(swap) if swap.exists() else 0,
        oom_kills=read_keys(memory / "memory.events")["oom_kill"],
    )


def read_int(path: Path) -> int:
    return int(path.read_text())


def read_keys(path: Path) -> dict[str, int]:
    """A flat keyed file; lines of another form are passed over."""
    pairs = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def write(path: Path, value: str) -> None:
    """One write, one system call: a control file takes each write as a command."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    except OSError as err:
        raise OSError(err.errno, f"{err.strerror} (writing {value})", str(path)) from err
    finally:
        os.close(fd)


def rmdir(path: str) -> None:
    """Idempotent. An emptied cgroup can stay busy for a moment, until its last task is reaped."""
    deadline = time.monotonic() + _RMDIR_PATIENCE_S
    pause_s = 0.001
    while True:
        try:
            Path(path).rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as err:
            if err.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(0.05, pause_s * 2)
