"""Where a node's maps and links are pinned, and the bpffs under it.

A host with a bpffs (systemd mounts one) gets a directory ``/sys/fs/bpf/dsec-<node>``: it is in
every mount namespace, so also a service restarted in a fresh one finds its pins. Elsewhere the node
mounts an instance of its own at ``<run>/bpf``: a superblock shared with nobody, so neither does our
unmount take another's pins away nor another's ours. The choice, once made, is found again.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from libhost import syscall
from libhost.errors import BusyError
from libhost.paths import NodePaths

_SHARED: Final = Path("/sys/fs/bpf")


def _is_bpffs(path: Path) -> bool:
    with Path("/proc/self/mountinfo").open() as table:
        for line in table:
            fields, _, rest = line.partition(" - ")
            if fields.split()[4] == str(path) and rest.startswith("bpf "):
                return True
    return False


def pin_directory(paths: NodePaths) -> Path:
    """The node's directory for pins, made ready if it was not."""
    found = _bpffs_of(paths)
    if found is None:
        found = paths.run_dir / "bpf"
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        syscall.mount(paths.cgroup_name, str(found), "bpf", data="mode=0700")
    # Never the root of the instance: kernels with BPF_PRELOAD keep files of their own in there.
    directory = found / paths.cgroup_name
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _bpffs_of(paths: NodePaths) -> Path | None:
    own = paths.run_dir / "bpf"
    return next((path for path in (own, _SHARED) if _is_bpffs(path)), None)


def remove_pins(paths: NodePaths) -> int:
    """Remove every pin of the node and what held them; returns how many there were. Idempotent.

    Each pin by name first: a copy of the mount in some other mount namespace would otherwise keep
    them, and the programs attached, alive.
    """
    bpffs = _bpffs_of(paths)
    if bpffs is None:
        return 0
    directory = bpffs / paths.cgroup_name
    pins = list(directory.iterdir()) if directory.is_dir() else []
    for pin in pins:
        pin.unlink(missing_ok=True)
    if directory.is_dir():
        directory.rmdir()
    if bpffs != _SHARED:
        syscall.umount2(str(bpffs))
        bpffs.rmdir()
    return len(pins)


def lock(paths: NodePaths) -> int:
    """A descriptor that makes its holder the only writer of the node's policy until it ends.

    Taken before anything is mounted or pinned. Raises BusyError if another process has it.
    """
    paths.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = paths.run_dir / "policy.lock"
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(fd)
        if err.errno != errno.EWOULDBLOCK:
            raise
        hint = "one policy service per node"
        raise BusyError(f"the network policy of node {paths.node} ({file})", hint) from err
    return fd
