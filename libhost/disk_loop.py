"""Writable layers as ext4 images on loop devices, from a pool that hides what they cost.

Attaching and mounting takes about 8 ms, so it is done ahead: a prepared disk is an image in
``<state>/disks`` that is mounted by descriptor. Taking one is a rename. Images come from a template
per size, copied extent by extent; only a new size pays for mkfs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libhost import command, loop, syscall
from libhost.overlay import OverlayMode
from libhost.paths import NodePaths, SandboxPaths
from libhost.writable import (
    DiskLimits,
    DiskMode,
    DiskUsage,
    WritableLayer,
    move_to_trash,
    open_places,
    usage_of,
)

_MKFS_TIMEOUT_S = 60.0
_INODE_BYTES = 256
_MIB = 1 << 20
# Bitmaps and descriptors of a 128 MiB block group, and the root directory: measured, rounded up.
_GROUP_OVERHEAD_BYTES = 64 << 10
_FIXED_OVERHEAD_BYTES = 256 << 10
# No journal and no barriers: the disk of a sandbox that outlives its host is of no use to anyone.
_MKFS = ("mkfs.ext4", "-q", "-F", "-b4096", f"-I{_INODE_BYTES}", "-m0")
_FEATURES = "^has_journal,^resize_inode"
_EXTENDED = "lazy_itable_init=1,nodiscard"
_MOUNT_FLAGS = ("nobarrier", "noinit_itable")


@dataclass(frozen=True)
class PreparedDisk:
    """An image nobody owns yet, mounted by descriptor only."""

    image: Path
    device: Path
    mount_fd: int


class LoopDisk:
    """The pool. refill, create, discard -> close."""

    mode = DiskMode.LOOP

    def __init__(self, paths: NodePaths, overlay: OverlayMode, *, pool_size: int) -> None:
        self._paths = paths
        self._by_path = overlay is OverlayMode.PATHS
        self._pool_size = pool_size
        self._pool: defaultdict[DiskLimits, deque[PreparedDisk]] = defaultdict(deque)
        self._template_lock = threading.Lock()
        # Where a sandbox's image was seen last: finding it again looks at every loop device.
        self._devices: dict[str, Path] = {}
        # A predecessor's prepared images are detached by now; they cost less than finding out
        # whether each of them was finished.
        move_to_trash(paths, paths.disks_dir)
        paths.disks_dir.mkdir(mode=0o700, parents=True)

    def create(self, sandbox: SandboxPaths, limits: DiskLimits) -> WritableLayer:
        sandbox.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sandbox.disk_image.exists():
            raise FileExistsError(errno.EEXIST, "the sandbox has a disk", str(sandbox.disk_image))
        disk = self._take(limits)
        try:
            disk.image.rename(sandbox.disk_image)
        except BaseException:
            os.close(disk.mount_fd)
            raise
        self._devices[sandbox.sandbox_id] = disk.device
        return self._layer(sandbox, disk.mount_fd)

    def open(self, sandbox: SandboxPaths) -> WritableLayer:
        return self._layer(sandbox, self._mount_existing(sandbox))

    def usage(self, sandbox: SandboxPaths) -> DiskUsage:
        mount_fd = self._mount_existing(sandbox)
        try:
            return usage_of(mount_fd)
        finally:
            os.close(mount_fd)

    def discard(self, sandbox: SandboxPaths) -> None:
        if self._by_path and sandbox.disk_dir.is_mount():
            syscall.umount2(str(sandbox.disk_dir), syscall.MNT_DETACH)
        self._devices.pop(sandbox.sandbox_id, None)
        move_to_trash(self._paths, sandbox.state_dir)

    def refill(self, sizes: Sequence[DiskLimits], *, at_most: int) -> int:
        """Up to the pool's size for each of ``sizes``; disks of other sizes are given back."""
        for limits in set(self._pool) - set(sizes):
            self._drop(limits)
        made = 0
        for limits in sizes:
            while made < at_most and len(self._pool[limits]) < self._pool_size:
                self._pool[limits].append(self._prepare(limits))
                made += 1
        return made

    def close(self) -> None:
        for limits in list(self._pool):
            self._drop(limits)

    def _take(self, limits: DiskLimits) -> PreparedDisk:
        with contextlib.suppress(IndexError):
            return self._pool[limits].popleft()
        return self._prepare(limits)

    def _drop(self, limits: DiskLimits) -> None:
        with contextlib.suppress(IndexError):
            while disk := self._pool[limits].popleft():
                os.close(disk.mount_fd)
                disk.image.unlink(missing_ok=True)

    def _prepare(self, limits: DiskLimits) -> PreparedDisk:
        template = self._template(limits)
        image = self._paths.disks_dir / f"{secrets.token_hex(8)}.img"
        try:
            _copy_sparse(template, image)
            device, mount_fd = mount_image(image)
        except BaseException:
            image.unlink(missing_ok=True)
            raise
        for name in ("upper", "work"):
            os.mkdir(name, 0o755, dir_fd=mount_fd)
        return PreparedDisk(image, device, mount_fd)

    def _template(self, limits: DiskLimits) -> Path:
        template = self._paths.disks_dir / f"{limits.size_mib}-{limits.files}.template"
        with self._template_lock:
            if not template.exists():
                make_filesystem(template, limits)
        return template

    def _mount_existing(self, sandbox: SandboxPaths) -> int:
        """Of a live sandbox the same file system once more, else the image attached anew."""
        image = sandbox.disk_image
        device = self._devices.get(sandbox.sandbox_id)
        if device is None or not loop.is_behind(device, image):
            device = loop.device_of(image)
        if device is not None:
            with contextlib.suppress(OSError):  # detached meanwhile
                mount_fd = _mount_device(device)
                # Mounted, it stays what it is; until then it could have become another's.
                if loop.is_behind(device, image):
                    return mount_fd
                os.close(mount_fd)
        self._devices[sandbox.sandbox_id], mount_fd = mount_image(image)
        return mount_fd

    def _layer(self, sandbox: SandboxPaths, mount_fd: int) -> WritableLayer:
        if not self._by_path:
            return open_places(mount_fd, None)
        sandbox.disk_dir.mkdir(mode=0o700, exist_ok=True)
        syscall.move_mount(mount_fd, str(sandbox.disk_dir))
        return open_places(mount_fd, sandbox.disk_dir, attached=sandbox.disk_dir)


def make_filesystem(image: Path, limits: DiskLimits) -> None:
    """The usable size is what was asked for: inode tables and bitmaps come on top."""
    size = limits.size_mib * _MIB
    groups = size // (128 * _MIB) + 1
    size += limits.files * _INODE_BYTES + groups * _GROUP_OVERHEAD_BYTES + _FIXED_OVERHEAD_BYTES
    partial = image.with_suffix(".partial")
    with partial.open("wb") as file:
        file.truncate((size + 4095) // 4096 * 4096)
    options = ("-O", _FEATURES, "-E", _EXTENDED, "-N", str(limits.files), str(partial))
    command.run([*_MKFS, *options], timeout_s=_MKFS_TIMEOUT_S)
    partial.rename(image)


def _copy_sparse(source: Path, target: Path) -> None:
    """Only the written extents: some 100 KiB of an image of any size."""
    with source.open("rb") as reading, target.open("xb") as writing:
        size = os.fstat(reading.fileno()).st_size
        os.truncate(writing.fileno(), size)
        offset = 0
        while offset < size:
            try:
                start = os.lseek(reading.fileno(), offset, os.SEEK_DATA)
            except OSError as err:
                if err.errno == errno.ENXIO:  # only a hole is left
                    return
                raise
            offset = os.lseek(reading.fileno(), start, os.SEEK_HOLE)
            _copy_range(reading.fileno(), writing.fileno(), start, offset)


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        start += os.copy_file_range(source, target, end - start, start, start)


def mount_image(image: Path) -> tuple[Path, int]:
    """Attach an image that is not attached and mount it detached: the device and the mount."""
    device_fd, device = loop.attach(image)
    try:
        return device, _mount_device(device)
    finally:
        os.close(device_fd)


def _mount_device(device: Path) -> int:
    fs = syscall.fsopen("ext4")
    try:
        syscall.fsconfig_set_string(fs, "source", str(device))
        for flag in _MOUNT_FLAGS:
            syscall.fsconfig_set_flag(fs, flag)
        syscall.fsconfig_create(fs)
        return syscall.fsmount(fs, syscall.MOUNT_ATTR_NODEV | syscall.MOUNT_ATTR_NOATIME)
    finally:
        os.close(fs)
