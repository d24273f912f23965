"""Memory pressure, and taking memory back from a frozen sandbox.

Where the memory controller is v2 the kernel reclaims (``memory.reclaim``); elsewhere the pages of
each process are advised out, and then the page cache that no process maps. Without swap only file
pages can go, and the result says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from libhost import cgroupfs, syscall
from libhost.cgroup import SandboxCgroup
from libhost.errors import UnsupportedError
from libhost.probe import HostCapabilities

_RECLAIM_STEP_BYTES = 256 << 20
# Memory of the sandbox that is not a file on a disk, by what /proc/<pid>/maps calls it.
_SHARED_ANONYMOUS = ("/dev/zero", "/memfd:", "/dev/shm/", "/SYSV", "anon_inode:")  # noqa: S108
_NOT_PAGES = ("[vvar", "[vdso]", "[vsyscall]")


@dataclass(frozen=True)
class Pressure:
    """Share of time (0..100) in which some, or all, tasks stood waiting."""

    some_avg10: float
    some_avg60: float
    full_avg10: float
    full_avg60: float
    some_total_us: int


class ReclaimWay(StrEnum):
    MEMORY_RECLAIM = "memory_reclaim"
    PAGEOUT = "pageout"
    FILE_ONLY = "file_only"


@dataclass(frozen=True)
class Reclaimed:
    """Differences of the cgroup's own counters; ``partial`` if a deadline or EAGAIN ended it."""

    way: ReclaimWay
    anon_bytes: int
    file_bytes: int
    swapped_bytes: int
    duration_s: float
    partial: bool


def read_pressure(path: Path) -> Pressure:
    """``/proc/pressure/*`` or a cgroup's ``*.pressure``; OSError EOPNOTSUPP where PSI is off."""
    lines: dict[str, dict[str, str]] = {}
    for line in path.read_text().splitlines():
        kind, *pairs = line.split()
        lines[kind] = dict(pair.split("=", 1) for pair in pairs)
    some = lines["some"]
    full = lines.get("full", {"avg10": "0", "avg60": "0"})  # cpu has none on older kernels
    return Pressure(
        float(some["avg10"]),
        float(some["avg60"]),
        float(full["avg10"]),
        float(full["avg60"]),
        int(some["total"]),
    )


def reclaim(cgroup: SandboxCgroup, host: HostCapabilities, *, timeout_s: float) -> Reclaimed:
    """Push out what can go. The cgroup should be frozen, else its tasks fetch it right back."""
    deadline = time.monotonic() + timeout_s
    started, before = time.monotonic(), cgroup.stats().memory
    if host.memory_reclaim.ok:
        way, partial = ReclaimWay.MEMORY_RECLAIM, _reclaim_v2(cgroup, deadline)
    elif host.process_madvise.ok:
        # Asked now and not of the probe: swap may have been added or taken away since.
        way = ReclaimWay.PAGEOUT if _swap_areas() else ReclaimWay.FILE_ONLY
        partial = _page_out(cgroup, deadline)
    else:
        raise UnsupportedError("memory reclaim", host.process_madvise.reason)
    after = cgroup.stats().memory
    return Reclaimed(
        way=way,
        anon_bytes=max(
            0, before.anon_bytes + before.shmem_bytes - after.anon_bytes - after.shmem_bytes
        ),
        file_bytes=max(0, before.file_bytes - after.file_bytes),
        swapped_bytes=max(0, after.swap_bytes - before.swap_bytes),
        duration_s=time.monotonic() - started,
        partial=partial,
    )


def _swap_areas() -> list[str]:
    return Path("/proc/swaps").read_text().splitlines()[1:]


def prefetch(cgroup: SandboxCgroup, *, timeout_s: float) -> int:
    """Ask for the swapped pages back (WILLNEED) before the thaw; returns the bytes advised.

    Files are left out: advice on a mapping reads all of the file, not what was in use.
    """
    deadline = time.monotonic() + timeout_s
    advised = 0
    for pid in cgroup.process_ids():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError), _pidfd(pid) as pidfd:
            ranges = [(m.start, m.length) for m in _mappings(pid) if m.anonymous]
            done, complete = _advise(pidfd, ranges, syscall.MADV_WILLNEED, deadline)
            advised += done
            if not complete:
                raise TimeoutError(f"prefetch of {cgroup.sandbox_id} took over {timeout_s} s")
    return advised


def _reclaim_v2(cgroup: SandboxCgroup, deadline: float) -> bool:
    """True if something was left. EAGAIN means that the kernel found less than it was asked for."""
    cgroup.open_swap()
    control = cgroup.v2_path / "memory.reclaim"
    while time.monotonic() < deadline:
        current = cgroupfs.read_int(cgroup.v2_path / "memory.current")
        if current == 0:
            return False
        try:
            cgroupfs.write(control, str(min(current, _RECLAIM_STEP_BYTES)))
        except OSError as err:
            if err.errno == errno.EAGAIN:
                return True
            raise
    return True


def _page_out(cgroup: SandboxCgroup, deadline: float) -> bool:
    """What processes map, then the rest of their page cache. True if the deadline cut it short."""
    partial = False
    for pid in cgroup.process_ids():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError), _pidfd(pid) as pidfd:
            ranges = [(m.start, m.length) for m in _mappings(pid)]
            partial |= not _advise(pidfd, ranges, syscall.MADV_PAGEOUT, deadline)[1]
    if time.monotonic() >= deadline:
        return True
    cgroup.drop_page_cache()
    return partial


@dataclass(frozen=True)
class _Mapping:
    start: int
    length: int
    anonymous: bool


def _mappings(pid: int) -> Iterator[_Mapping]:
    """What is made of pages; special areas refuse all advice."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, _, _, inode, *name = line.split(maxsplit=5)
        label = name[0] if name else ""
        if label.startswith(_NOT_PAGES):
            continue
        start, end = (int(edge, 16) for edge in span.split("-"))
        anonymous = inode == "0" or label.startswith(_SHARED_ANONYMOUS)
        yield _Mapping(start, end - start, anonymous)


def _advise(
    pidfd: int, ranges: list[tuple[int, int]], advice: int, deadline: float
) -> tuple[int, bool]:
    """Bytes advised, and whether all ranges were tried before the deadline.

    The call may stop short anywhere; it says at which byte. A range that it refuses (locked
    memory, device memory) is passed over.
    """
    total = 0
    queue = list(reversed(ranges))
    while queue:
        if time.monotonic() >= deadline:
            return total, False
        batch = queue[: -syscall.IOV_MAX - 1 : -1]
        try:
            done = syscall.process_madvise(pidfd, batch, advice)
        except ProcessLookupError:
            return total, True
        except OSError as err:
            if err.errno not in (errno.EINVAL, errno.ENOMEM, errno.EBUSY):
                raise
            queue.pop()
            continue
        total += done
        _consume(queue, done)
    return total, True


def _consume(queue: list[tuple[int, int]], done: int) -> None:
    """Take ``done`` bytes off the end of the reversed queue; none at all passes one range over."""
    if done == 0:
        queue.pop()
    while done > 0:
        start, length = queue.pop()
        if done < length:
            queue.append((start + done, length - done))
        done -= min(done, length)


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)
