"""Loop devices: attach an image so that the kernel detaches it by itself when it is last used.

A device is only ever found by the image behind it. Numbers are never stored: they are reused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_LO_FLAGS_DIRECT_IO = 16
# struct loop_config (linux/loop.h): fd, block_size, loop_info64 of which only lo_flags is set.
_CONFIG = struct.Struct("=II" + "5Q" + "4I" + "64s64s32s2Q" + "8Q")
_BLOCK_SIZE = 4096
_ATTEMPTS = 64
_SYS_BLOCK = Path("/sys/block")


def attach(image: Path) -> tuple[int, Path]:
    """Put ``image`` behind a free device; returns the device's descriptor and path.

    The device lives while someone has it open or mounted. Direct I/O: the file system on top
    caches already, a second copy in the image's page cache would be waste.
    """
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_ATTEMPTS):
            device = Path(f"/dev/loop{_free_number()}")
            writer = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(writer, _LOOP_CONFIGURE, _config(backing))
                # To configure takes a writer; to mount, many kernels want that there is none.
                return os.open(device, os.O_RDONLY | os.O_CLOEXEC), device
            except OSError as err:
                # EBUSY: somebody else was faster with this number.
                if err.errno != errno.EBUSY:
                    raise OSError(err.errno, f"{err.strerror} ({device})", str(image)) from err
            finally:
                os.close(writer)
    finally:
        os.close(backing)
    raise OSError(errno.EAGAIN, f"no loop device was free in {_ATTEMPTS} attempts", str(image))


def _config(backing: int) -> bytes:
    flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
    info = (0, 0, 0, 0, 0, 0, 0, 0, flags, b"", b"", b"", 0, 0)
    return _CONFIG.pack(backing, _BLOCK_SIZE, *info, *[0] * 8)


def _free_number() -> int:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    finally:
        os.close(control)


def attached() -> Iterator[tuple[Path, Path]]:
    """Every (device, image) of the host; a deleted image's name ends in `` (deleted)``."""
    for entry in _SYS_BLOCK.glob("loop*"):
        backing = _backing_file(entry)
        if backing is not None:
            yield Path("/dev") / entry.name, backing


def device_of(image: Path) -> Path | None:
    """The device an image is attached to, if it is. Looks at every device of the host."""
    return next((device for device, backing in attached() if backing == image), None)


def is_behind(device: Path, image: Path) -> bool:
    return _backing_file(_SYS_BLOCK / device.name) == image


def _backing_file(entry: Path) -> Path | None:
    """None if the device is not attached, or no longer."""
    try:
        return Path((entry / "loop" / "backing_file").read_text().rstrip("\n"))
    except OSError:
        return None
