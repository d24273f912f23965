"""EROFS images: build one from a directory, check it, mount it straight from its file.

Deterministic: the same tree, modification times included, gives the same bytes from one mkfs, so
the digest names the content.
An image on tmpfs or overlayfs cannot be mounted this way (the kernel answers ENOTBLK).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from libhost import command, syscall

_NIL_UUID = "00000000-0000-0000-0000-000000000000"
_EPOCH_2100 = "4102444800"


def build_image(directory: Path, image: Path, *, timeout_s: float = 600.0) -> None:
    """Pack ``directory`` into ``image`` (written beside it first, then renamed).

    With lz4: half the bytes to ship and to cache, built faster, cold reads as fast as plain ones
    (``docs/adr/0005-libhost.md``).
    """
    partial = image.with_name(f".{image.name}.{os.getpid()}.partial")
    argv = ["mkfs.erofs", "-zlz4", f"-U{_NIL_UUID}", "--quiet", str(partial), str(directory)]
    try:
        # The epoch fixes the image's own time and only caps the files': theirs are kept, because
        # compiled Python and make compare them.
        command.run(argv, timeout_s=timeout_s, env={"SOURCE_DATE_EPOCH": _EPOCH_2100})
        partial.rename(image)
    finally:
        partial.unlink(missing_ok=True)


def check_image(image: Path, *, timeout_s: float = 600.0) -> None:
    """fsck; raises CommandFailedError for a damaged image."""
    done = command.run(["fsck.erofs", "--extract", str(image)], timeout_s=timeout_s)
    if done.stderr:
        # A superblock whose checksum is wrong is only complained about: the exit code is 0.
        raise command.CommandFailedError(done)


def mount_image(image: Path) -> int:
    """Mount read-only, nodev, without a loop device; returns the detached mount's descriptor."""
    fs = syscall.fsopen("erofs")
    try:
        syscall.fsconfig_set_string(fs, "source", str(image))
        syscall.fsconfig_set_flag(fs, "ro")
        syscall.fsconfig_create(fs)
        attributes = syscall.MOUNT_ATTR_RDONLY | syscall.MOUNT_ATTR_NODEV
        return syscall.fsmount(fs, attributes)
    except OSError as err:
        hint = ""
        if err.errno == errno.ENOTBLK:
            hint = " (an image is mounted from a file on ext4 or xfs, not on tmpfs or overlayfs)"
        raise OSError(err.errno, f"{err.strerror}{hint}", str(image)) from err
    finally:
        os.close(fs)
