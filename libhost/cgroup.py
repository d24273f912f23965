"""A sandbox's cgroups, alike on a unified hierarchy and on a hybrid one.

On a hybrid host memory, cpu and pids are v1 hierarchies and the v2 tree has no controllers but
still freezes, kills and reports; on a unified host all of it is one directory. Names::

    dsec-<node>/{ls,be}/<id>          limits, freeze, kill, statistics      (every hierarchy)
    dsec-<node>/{ls,be}/<id>/box      where PID 1 starts; no limits in it   (v2 only)
    dsec-<node>/{ls,be}/<id>/box/*    one leaf per command, made by the agent

The agent gets ``box`` and not ``<id>``, so that what it can write never includes a limit.
Never touches a cgroup whose top is not ``dsec-``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from libhost import cgroupfs, syscall
from libhost.cgroupfs import CgroupLimits, MemoryStats
from libhost.errors import UnsupportedError
from libhost.paths import NodePaths

__all__ = [
    "CgroupLayout",
    "CgroupLimits",
    "CgroupStats",
    "MemoryStats",
    "NodeCgroups",
    "SandboxCgroup",
    "SchedClass",
]

# Twice what one busy task outside has on each processor. By default all sandboxes together would
# weigh as much as one such task, and a burst of starts would take three times as long beside two.
_WEIGHT_PER_CPU = 200
CONTROLLERS = ("memory", "cpu", "pids")


class SchedClass(StrEnum):
    """Latency-sensitive, or best-effort: runs only when nothing latency-sensitive wants to."""

    LS = "ls"
    BE = "be"


@dataclass(frozen=True)
class CgroupStats:
    memory: MemoryStats
    cpu_usage_us: int
    pids_current: int
    pids_refused: int


@dataclass(frozen=True)
class CgroupLayout:
    """Which directory serves which controller on this host; ``unified`` is always the v2 tree."""

    unified: Path
    memory: Path
    cpu: Path
    pids: Path

    @property
    def hybrid(self) -> bool:
        return self.memory != self.unified

    @property
    def hierarchies(self) -> tuple[Path, ...]:
        """Each hierarchy once, the v2 tree last: it is there that a sandbox is seen to exist."""
        v1 = (self.memory, self.cpu, self.pids) if self.hybrid else ()
        return (*dict.fromkeys(v1), self.unified)

    def check_delegation(self) -> None:
        """UnsupportedError unless children of a unified root get the controllers."""
        if self.hybrid:
            return
        control = self.unified / "cgroup.subtree_control"
        missing = [name for name in CONTROLLERS if name not in control.read_text().split()]
        if missing:
            raise UnsupportedError(
                "cgroups",
                f"{control} lacks {', '.join(missing)}",
                "enable them there: the root cgroup is the host's to change",
            )

    @classmethod
    def detect(cls, mountinfo: str) -> Self:
        """From the text of ``/proc/self/mountinfo``; raises UnsupportedError naming the lack."""
        unified: Path | None = None
        v1: dict[str, Path] = {}
        for mount_point, fstype, options in _cgroup_mounts(mountinfo):
            if fstype == "cgroup2":
                unified = unified or mount_point
            else:
                v1.update((name, mount_point) for name in CONTROLLERS if name in options)
        if unified is None:
            raise UnsupportedError(
                "cgroups", "no cgroup2 hierarchy is mounted", "mount -t cgroup2 none /sys/fs/cgroup"
            )
        if not v1:
            return cls(unified, unified, unified, unified)
        missing = [name for name in CONTROLLERS if name not in v1]
        if missing:
            raise UnsupportedError("cgroups", f"no v1 hierarchy has {', '.join(missing)}")
        return cls(unified, v1["memory"], v1["cpu"], v1["pids"])


def _cgroup_mounts(mountinfo: str) -> Iterator[tuple[Path, str, list[str]]]:
    for line in mountinfo.splitlines():
        mount, _, filesystem = line.partition(" - ")
        fstype, _, options = filesystem.split(" ", 2)
        fields = mount.split(" ")
        if fstype in ("cgroup", "cgroup2") and fields[3] == "/":
            yield Path(fields[4]), fstype, options.split(",")


class SandboxCgroup:
    """create/open -> join (launcher) -> freeze, thaw, stats -> kill -> wait_empty -> remove."""

    def __init__(
        self, layout: CgroupLayout, name: str, sched_class: SchedClass, sandbox_id: str
    ) -> None:
        self.sandbox_id = sandbox_id
        self.sched_class = sched_class
        self._layout = layout
        self._below = f"{name}/{sched_class}/{sandbox_id}"

    @property
    def hybrid(self) -> bool:
        return self._layout.hybrid

    @property
    def join_files(self) -> tuple[Path, ...]:
        """The v1 ``cgroup.procs`` files a process writes ``0`` to; the v2 one it is created in."""
        return tuple(root / self._below / "cgroup.procs" for root in self._layout.hierarchies[:-1])

    @property
    def box(self) -> Path:
        """The v2 directory PID 1 is created in, and all the agent can change."""
        return self.v2_path / "box"

    @property
    def v2_path(self) -> Path:
        """The v2 directory: what BPF programs attach to and whose inode is the cgroup id."""
        return self._layout.unified / self._below

    def make(self, limits: CgroupLimits) -> None:
        """All of it or nothing; FileExistsError, with nothing touched, if it exists already."""
        first, *others = self._layout.hierarchies
        (first / self._below).mkdir(mode=0o755)
        try:
            for root in others:
                (root / self._below).mkdir(mode=0o755)
            self.box.mkdir(mode=0o755)
            self.set_limits(limits)
        except BaseException:
            self.remove()
            raise

    def open_box(self) -> int:
        """Descriptor of ``box`` for the agent: a mount of its own, so that ``..`` ends there."""
        return syscall.open_tree(syscall.AT_FDCWD, str(self.box), syscall.OPEN_TREE_CLONE)

    def set_limits(self, limits: CgroupLimits) -> None:
        dialect = cgroupfs.write_limits_v1 if self._layout.hybrid else cgroupfs.write_limits_v2
        dialect(self._controller("memory"), self._controller("cpu"), limits)
        cgroupfs.write(self._controller("pids") / "pids.max", str(limits.pids))

    def open_swap(self) -> None:
        """Let a frozen sandbox's memory go to swap; :meth:`set_limits` closes it again."""
        if not self._layout.hybrid:
            cgroupfs.write(self.v2_path / "memory.swap.max", "max")

    def drop_page_cache(self) -> None:
        """v1 only: reclaim what no process maps. ``memory.reclaim`` does it on v2."""
        if self._layout.hybrid:
            cgroupfs.write(self._controller("memory") / "memory.force_empty", "0")

    def freeze(self, *, timeout_s: float) -> None:
        """Freeze and wait until the kernel says so; TimeoutError leaves it freezing."""
        cgroupfs.write(self.v2_path / "cgroup.freeze", "1")
        self._wait_for("frozen", "1", timeout_s)

    def thaw(self) -> None:
        cgroupfs.write(self.v2_path / "cgroup.freeze", "0")

    def is_frozen(self) -> bool:
        return cgroupfs.read_keys(self.v2_path / "cgroup.events")["frozen"] == 1

    def kill(self) -> None:
        """SIGKILL to every process in it, frozen or not; returns at once."""
        with contextlib.suppress(FileNotFoundError):
            cgroupfs.write(self.v2_path / "cgroup.kill", "1")

    def is_populated(self) -> bool:
        return cgroupfs.read_keys(self.v2_path / "cgroup.events")["populated"] == 1

    def open_events(self) -> int:
        """Descriptor of ``cgroup.events``: POLLPRI on it means populated or frozen changed."""
        return os.open(self.v2_path / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)

    def wait_empty(self, *, timeout_s: float) -> None:
        """Raises TimeoutError with the pids that are left."""
        try:
            self._wait_for("populated", "0", timeout_s)
        except FileNotFoundError:
            return
        except TimeoutError as err:
            left = self.process_ids()
            raise TimeoutError(f"sandbox {self.sandbox_id} still has processes {left}") from err

    def process_ids(self) -> list[int]:
        """Every process in it and below."""
        found: list[int] = []
        for directory, _, _ in os.walk(self.v2_path):
            with contextlib.suppress(FileNotFoundError, OSError):
                found += map(int, Path(directory, "cgroup.procs").read_text().split())
        return found

    def stats(self) -> CgroupStats:
        pids = self._controller("pids")
        dialect = cgroupfs.memory_stats_v1 if self._layout.hybrid else cgroupfs.memory_stats_v2
        return CgroupStats(
            memory=dialect(self._controller("memory")),
            # The v2 tree counts cpu time with or without the controller.
            cpu_usage_us=cgroupfs.read_keys(self.v2_path / "cpu.stat")["usage_usec"],
            pids_current=cgroupfs.read_int(pids / "pids.current"),
            pids_refused=cgroupfs.read_keys(pids / "pids.events")["max"],
        )

    def remove(self) -> None:
        """Remove an empty cgroup from every hierarchy; idempotent."""
        for root in reversed(self._layout.hierarchies):
            for directory, _, _ in os.walk(root / self._below, topdown=False):
                cgroupfs.rmdir(directory)

    def _controller(self, name: str) -> Path:
        root: Path = getattr(self._layout, name)
        return root / self._below

    def _wait_for(self, key: str, value: str, timeout_s: float) -> None:
        """The kernel raises POLLPRI on ``cgroup.events`` at every change, so nothing is polled."""
        deadline = time.monotonic() + timeout_s
        wanted = f"{key} {value}".encode()
        fd = self.open_events()
        try:
            poll = select.poll()
            poll.register(fd, select.POLLPRI)
            while wanted not in os.pread(fd, 4096, 0).splitlines():
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not poll.poll(left_s * 1000):
                    raise TimeoutError(f"{self.v2_path}: not {key}={value} within {timeout_s} s")
        except OSError as err:
            # Reading a cgroup that is removed meanwhile.
            if err.errno == errno.ENODEV:
                raise FileNotFoundError(errno.ENOENT, "cgroup removed", str(self.v2_path)) from err
            raise
        finally:
            os.close(fd)


def open_quick_joins() -> int:
    """Make joining a cgroup cheap for as long as the returned descriptor is open; -1: it cannot be.

    A process that joins a cgroup takes a lock whose writers normally wait for an RCU grace period:
    8-14 ms at every create, and again wherever the agent cannot fork into a cgroup. The mount
    option ``favordynmods`` of any hierarchy makes it 0.3 ms, for a slightly dearer fork and exit
    everywhere (https://docs.kernel.org/admin-guide/cgroup-v2.html). It is set on an empty
    hierarchy of our own, so that nobody's mount is changed.
    """
    try:
        fs = syscall.fsopen("cgroup")
    except OSError:  # a kernel without v1 hierarchies
        return -1
    try:
        syscall.fsconfig_set_flag(fs, "none")
        syscall.fsconfig_set_string(fs, "name", "dsec")
        syscall.fsconfig_set_flag(fs, "favordynmods")
        syscall.fsconfig_create(fs)
        return syscall.fsmount(fs)
    except OSError:  # older than 6.0
        return -1
    finally:
        os.close(fs)


class NodeCgroups:
    """The node's subtree in every hierarchy."""

    def __init__(self, layout: CgroupLayout, paths: NodePaths) -> None:
        self.layout = layout
        self._name = paths.cgroup_name
        self._quick_joins = -1

    def ensure(self) -> None:
        """Create the node's parents (``cpu.idle`` on ``be``); idempotent."""
        if self._quick_joins < 0:
            self._quick_joins = open_quick_joins()
        for root in self.layout.hierarchies:
            top = root / self._name
            for directory in (top, top / SchedClass.LS, top / SchedClass.BE):
                directory.mkdir(mode=0o755, exist_ok=True)
        if not self.layout.hybrid:
            self._delegate_controllers()
        cgroupfs.write(self.layout.cpu / self._name / SchedClass.BE / "cpu.idle", "1")
        weigh = cgroupfs.write_weight_v1 if self.layout.hybrid else cgroupfs.write_weight_v2
        weigh(self.layout.cpu / self._name, _WEIGHT_PER_CPU * (os.cpu_count() or 1))

    def _delegate_controllers(self) -> None:
        self.layout.check_delegation()
        wanted = " ".join(f"+{name}" for name in CONTROLLERS)
        top = self.layout.unified / self._name
        for directory in (top, top / SchedClass.LS, top / SchedClass.BE):
            cgroupfs.write(directory / "cgroup.subtree_control", wanted)

    @property
    def v2_path(self) -> Path:
        """Parent of all sandboxes' v2 cgroups: where node-wide BPF programs are attached."""
        return self.layout.unified / self._name

    def create(self, sandbox_id: str, sched: SchedClass, limits: CgroupLimits) -> SandboxCgroup:
        """FileExistsError if the sandbox has one, in whichever class."""
        first = self.layout.hierarchies[0]
        for other in SchedClass:
            if other != sched and (first / self._name / other / sandbox_id).exists():
                raise FileExistsError(errno.EEXIST, f"the sandbox runs as {other}", sandbox_id)
        cgroup = self._cgroup(sandbox_id, sched)
        cgroup.make(limits)
        return cgroup

    def open(self, sandbox_id: str) -> SandboxCgroup:
        """Raises FileNotFoundError if no hierarchy has it."""
        for sched in SchedClass:
            for root in self.layout.hierarchies:
                if (root / self._name / sched / sandbox_id).is_dir():
                    return self._cgroup(sandbox_id, sched)
        raise FileNotFoundError(errno.ENOENT, "no cgroup of the sandbox", sandbox_id)

    def list_ids(self) -> Sequence[str]:
        """Ids found in any hierarchy, also half-made ones."""
        found: dict[str, None] = {}
        for root in self.layout.hierarchies:
            for sched in SchedClass:
                with (
                    contextlib.suppress(FileNotFoundError),
                    os.scandir(root / self._name / sched) as entries,
                ):
                    found.update((entry.name, None) for entry in entries if entry.is_dir())
        return list(found)

    def remove(self) -> None:
        """Remove the node's own parents; fails with OSError EBUSY while a sandbox is left."""
        if self._quick_joins >= 0:
            os.close(self._quick_joins)
            self._quick_joins = -1
        for root in self.layout.hierarchies:
            for directory in (SchedClass.LS, SchedClass.BE, ""):
                with contextlib.suppress(FileNotFoundError):
                    (root / self._name / directory).rmdir()

    def _cgroup(self, sandbox_id: str, sched: SchedClass) -> SandboxCgroup:
        return SandboxCgroup(self.layout, self._name, sched, sandbox_id)
