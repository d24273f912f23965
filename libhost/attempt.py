"""The experiments of the probe: each does the thing in small, undoes it, and says what it saw.

An experiment that raises has its answer: no, for the reason raised.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from libhost import cgroupfs, command, disk_loop, disk_quota, erofs, pidfd, sched, syscall
from libhost.cgroup import CgroupLayout, open_quick_joins
from libhost.errors import UnsupportedError
from libhost.overlay import OverlayMode, apply, plan_overlay
from libhost.writable import DiskLimits, Place

_TIMEOUT_S = 20.0


def run_crun() -> str:
    said = command.run(["crun", "--version"], timeout_s=_TIMEOUT_S).stdout.decode()
    return said.splitlines()[0]


def mount_erofs(scratch: Path, image: Path) -> str:
    tree = scratch / "tree"
    tree.mkdir()
    (tree / "file").write_text("seen")
    erofs.build_image(tree, image, timeout_s=_TIMEOUT_S)
    os.close(erofs.mount_image(image))
    return "mounted from a file without a loop device"


def limit_project(scratch: Path) -> str:
    if not disk_quota.has_project_quota(scratch):
        raise UnsupportedError("project quota", f"no project quota on the file system of {scratch}")
    return "a project limit was set and removed"


def mount_loop(scratch: Path) -> str:
    image = scratch / "disk.img"
    disk_loop.make_filesystem(image, DiskLimits(size_mib=8))
    os.close(disk_loop.mount_image(image)[1])
    return "an ext4 image was mounted from a loop device"


def stack(scratch: Path, image: Path, mode: OverlayMode) -> str:
    """The real thing: a detached layer under a detached disk, or for PATHS two directories."""
    with contextlib.ExitStack() as held:

        def open_in(fd: int, name: str) -> Place:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=fd)
            opened = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
            held.callback(os.close, opened)
            return Place(opened, scratch / name)

        if mode is OverlayMode.PATHS:
            disk = os.open(scratch, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            lower = Place(disk, scratch / "tree")
        else:
            disk = disk_loop.mount_image(scratch / "disk.img")[1]
            lower = Place(erofs.mount_image(image), None)
            held.callback(os.close, lower.fd)
        held.callback(os.close, disk)
        upper, work = open_in(disk, f"upper-{mode}"), open_in(disk, f"work-{mode}")
        root = apply(plan_overlay([lower], upper, work, mode))
        held.callback(os.close, root)
        os.stat("file", dir_fd=root)
    return "mounted"


def reclaim_cgroup(layout: CgroupLayout | None) -> str:
    with _scratch_cgroup(layout) as path:
        if not (path / "memory.reclaim").exists():
            raise UnsupportedError("memory.reclaim", "the v2 tree has no memory.reclaim")
        try:
            cgroupfs.write(path / "memory.reclaim", "4096")
        except OSError as err:
            if err.errno != errno.EAGAIN:  # EAGAIN: understood, but it is empty
                raise
    return "memory.reclaim takes orders"


def kill_cgroup(layout: CgroupLayout | None) -> str:
    with _scratch_cgroup(layout) as path:
        cgroupfs.write(path / "cgroup.kill", "1")
    return "cgroup.kill takes orders"


@contextlib.contextmanager
def _scratch_cgroup(layout: CgroupLayout | None) -> Iterator[Path]:
    if layout is None:
        raise UnsupportedError("cgroups", "no usable cgroup layout")
    path = layout.unified / f"dsec-probe-{secrets.token_hex(4)}"
    path.mkdir()
    try:
        yield path
    finally:
        path.rmdir()


def favor_joins() -> str:
    fd = open_quick_joins()
    if fd < 0:
        raise UnsupportedError("quick cgroup joins", "the mount option favordynmods was refused")
    os.close(fd)
    return "favordynmods was accepted"


def advise_own_heap() -> str:
    maps = Path("/proc/self/maps").read_text().splitlines()
    line = next((mapping for mapping in maps if "[heap]" in mapping), None)
    if line is None:
        raise UnsupportedError("process_madvise", "this process has no heap to try it on")
    start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
    own = os.pidfd_open(os.getpid())
    try:
        syscall.process_madvise(own, [(start, end - start)], syscall.MADV_PAGEOUT)
    finally:
        os.close(own)
    return "MADV_PAGEOUT was accepted"


def find_swap() -> str:
    areas = Path("/proc/swaps").read_text().splitlines()[1:]
    if not areas:
        raise UnsupportedError("swap", "no swap area is in use: only file pages can be taken back")
    return f"{len(areas)} area(s), the first is {areas[0].split()[0]}"


def take_cookie() -> str:
    sched.new_cookie(())
    return "a cookie was made"


def read_pressure() -> str:
    return Path("/proc/pressure/memory").read_text().splitlines()[0]


def read_exit_by_pidfd() -> str:
    pid = command.spawn(["true"])
    fd = os.pidfd_open(pid)
    try:
        pidfd.wait(fd, timeout_s=_TIMEOUT_S)
        os.waitpid(pid, 0)
        if pidfd.exit_status(fd, timeout_s=0).code != 0:
            raise UnsupportedError("exit by pidfd", "the kernel forgets how a reaped process ended")
    finally:
        os.close(fd)
    return "exit codes are told after reaping"
