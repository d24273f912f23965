"""The node's private mount namespace: made once, pinned, joined by every successor.

The edge mounts layers where no other process of the host sees them. The namespace is kept alive
by a bind of its nsfs file at ``<run>/ns/mnt``, so that the mounts outlive an edge that is killed
and the next one shares their page cache instead of mounting a second copy. Mounts the host makes
later are not seen inside.

``<run>/live`` is a tmpfs in it: a create makes a dozen small files, which cost 5 us each there and
400 us on the ext4 of a plain disk, and when the namespace goes, nothing of them is left to sweep.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from libhost import syscall
from libhost.errors import HostError
from libhost.paths import NodePaths

_NS_GET_NSTYPE = 0xB703
_SELF = "/proc/self/ns/mnt"
# Some 20 KiB for each of a few thousand sandboxes.
_LIVE_OPTIONS = "mode=0700,size=256m"


def enter_node_namespace(paths: NodePaths) -> None:
    """Move this process into the node's mount namespace, creating and pinning it if need be.

    Call it first thing in ``__main__``: the kernel moves only a process of one thread, and what
    was opened before keeps pointing at the old namespace. Idempotent. Killed half-way, it leaves
    either nothing or a namespace that the next call joins.
    """
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise HostError(f"cannot change the mount namespace of a process with {threads} threads")
    pin = paths.namespace_pin
    pin.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(pin.parent):
        if _inode_file(pin).is_file() and _inode_file(pin).read_text() == _current_inode():
            return
        directory = os.getcwd()  # noqa: PTH109 -- setns resets it
        namespace = _open_pinned(pin)
        if namespace is None:
            namespace = _make_pinned(pin, paths.live_dir)
        try:
            syscall.setns(namespace, syscall.CLONE_NEWNS)
        finally:
            os.close(namespace)
        _inode_file(pin).write_text(_current_inode())
        os.chdir(directory)


def remove_node_namespace(paths: NodePaths) -> None:
    """Drop the pin: the namespace and every layer mount in it go with their last user.

    Called from outside the namespace, by ``dsec down`` and by tests. Idempotent.
    """
    pin = paths.namespace_pin
    if not pin.parent.is_dir():
        return
    with _locked(pin.parent):
        namespace = _open_pinned(pin)
        if namespace is not None:
            os.close(namespace)
            syscall.umount2(str(pin), syscall.MNT_DETACH)
        try:
            syscall.umount2(str(pin.parent), syscall.MNT_DETACH)
        except OSError as err:
            if err.errno != errno.EINVAL:  # not a mount
                raise
    for leftover in (pin, _inode_file(pin)):
        leftover.unlink(missing_ok=True)


def _make_pinned(pin: Path, live_dir: Path) -> int:
    """A new namespace, bound from the old one: a namespace cannot hold the bind of itself."""
    live_dir.mkdir(mode=0o700, exist_ok=True)
    directory = pin.parent
    # Below a shared mount, as a host's root often is, the bind of a namespace is refused.
    try:
        syscall.mount("none", str(directory), None, syscall.MS_PRIVATE)
    except OSError as err:
        if err.errno != errno.EINVAL:  # EINVAL: not a mount yet
            raise
        syscall.mount(str(directory), str(directory), None, syscall.MS_BIND)
        syscall.mount("none", str(directory), None, syscall.MS_PRIVATE)
    pin.touch(mode=0o600)
    old = os.open(_SELF, os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscall.unshare(syscall.CLONE_NEWNS)
        syscall.mount("none", "/", None, syscall.MS_REC | syscall.MS_PRIVATE)
        flags = syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC
        syscall.mount("dsec", str(live_dir), "tmpfs", flags, _LIVE_OPTIONS)
        new = os.open(_SELF, os.O_RDONLY | os.O_CLOEXEC)
        syscall.setns(old, syscall.CLONE_NEWNS)
        syscall.mount(f"/proc/self/fd/{new}", str(pin), None, syscall.MS_BIND)
    finally:
        os.close(old)
    return new


def _open_pinned(pin: Path) -> int | None:
    """The pinned namespace, None if the file is missing or only a file."""
    try:
        fd = os.open(pin, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        if fcntl.ioctl(fd, _NS_GET_NSTYPE) == syscall.CLONE_NEWNS:
            return fd
    os.close(fd)
    return None


def _inode_file(pin: Path) -> Path:
    """Inside the namespace the pin itself is not visible; its number says where we are."""
    return pin.with_suffix(".inode")


def _current_inode() -> str:
    return str(Path(_SELF).stat().st_ino)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
