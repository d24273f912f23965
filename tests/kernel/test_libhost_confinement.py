"""What root inside a sandbox can reach. The table is the promise, docs/adr/0006 the reasons."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from libhost.oci import CAPABILITIES

from .libhost_node import Box, libhost_node

ABSENT_OR_MASKED = "ENOENT", "ENODATA"  # which of them is the kernel's configuration

# Attempt -> what answers. "ok" rows are what must go on working.
TABLE: dict[str, str | tuple[str, ...]] = {
    # mounts and namespaces
    "mount": "EPERM",
    "umount-mask": "EPERM",
    "remount-proc-sys": "EPERM",
    "pivot_root": "EPERM",
    "open_tree": "EPERM",
    "fsopen": "EPERM",
    "unshare-user": "EPERM",
    "unshare-mount": "EPERM",
    "unshare-files": "ok",
    "clone-user": "EPERM",
    "clone-user-high-bits": "EPERM",
    "clone3": "ENOSYS",
    "setns-init": "EPERM",
    # kernel surface
    "bpf": "EPERM",
    "perf": "EPERM",
    "keyctl": "EPERM",
    "io_uring": "ENOSYS",
    "userfaultfd": "EPERM",
    "open_by_handle": "EPERM",
    "kexec": "EPERM",
    "init_module": "EPERM",
    "reboot": "EPERM",
    "syslog": "EPERM",
    "swapon": "EPERM",
    "newest-call": "ENOSYS",
    # sockets
    "af_packet": "EPERM",
    "af_packet-high-bits": "EPERM",
    "af_vsock": "EAFNOSUPPORT",
    "af_alg": "EAFNOSUPPORT",
    "raw-icmp": "EPERM",
    "tcp": "ok",
    "netlink": "ok",
    # devices
    "mknod-disk": "EPERM",
    "mknod-mem": "EPERM",
    "mkfifo": "ok",
    # ways round the disk's limit
    "fssetxattr": "EPERM",
    "fssetxattr-high-bits": "EPERM",
    "setflags": "EOPNOTSUPP",
    "swapext": "EPERM",
    "swapext-high-bits": "EPERM",
    "file_setattr": "EPERM",
    "quotactl": "EPERM",
    # the agent
    "ptrace-init": "EPERM",
    "ptrace-child": "ok",
    "memory-of-init": ("EPERM", "ENOSYS"),
    "descriptor-of-init": "EPERM",
    "cgroup-of-init": "EACCES",
    "escape-by-init-cwd": "EACCES",
    "overwrite-agent": "EACCES",
    # what obeys uid 0 without a capability
    "kcore": ABSENT_OR_MASKED,
    "kpagecgroup": ABSENT_OR_MASKED,
    "kpageflags": ABSENT_OR_MASKED,
    "keys": ABSENT_OR_MASKED,
    "sysrq": ABSENT_OR_MASKED,
    "core-pattern": "EROFS",
    "uevent-helper": "ENOENT",
    "sysfs-write": "EROFS",
    "tiocsti": "EPERM",
    # resources
    "sched-cookie": "EINVAL",
    "fifo-priority": "EPERM",
    "nice": "EACCES",
    "more-files": "EPERM",
    "settime": "EPERM",
    "sethostname": "EPERM",
    # what installing and serving needs
    "chroot": "ok",
    "setuid": "ok",
}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    directory = tmp_path_factory.mktemp("confinement")
    with libhost_node(f"t{os.urandom(4).hex()}", directory) as node:
        yield node.start()


@pytest.mark.parametrize("attempt", TABLE)
def test_root_inside(box: Box, attempt: str) -> None:
    expected = TABLE[attempt]
    assert box.reach(attempt) in ((expected,) if isinstance(expected, str) else expected)


def test_killing_init_from_inside_does_nothing(box: Box) -> None:
    box.reach("kill-init")
    assert box.sh("echo alive") == "alive\n"


def test_no_process_has_more_than_the_floor(box: Box) -> None:
    names = {name: index for index, name in enumerate(_capability_names())}
    floor = sum(1 << names[name] for name in CAPABILITIES)
    lines = box.sh("cat /proc/self/status /proc/1/status").splitlines()
    masks = {tuple(line.split()) for line in lines if line.startswith("Cap")}
    assert {mask for kind, mask in masks if kind in ("CapInh:", "CapAmb:")} == {f"{0:016x}"}
    assert {mask for kind, mask in masks if kind == "CapBnd:"} == {f"{floor:016x}"}


def test_filter_is_in_force_for_commands(box: Box) -> None:
    assert "Seccomp:\t2" in box.sh("cat /proc/self/status")


def test_other_abi_has_no_calls(box: Box) -> None:
    """Numbers mean other calls there and there is no table for them, so it gets none. A kernel
    without the ABI answers with a signal, another machine has no such instruction."""
    said = box.sh("reach i386 || echo $?").split()[-1]
    assert said in ("ENOSYS", "139", "ENOTSUP")


def _capability_names() -> list[str]:
    """In the kernel's order, from its own header."""
    header = Path("/usr/include/linux/capability.h").read_text()
    found = re.findall(r"^#define (CAP_[A-Z_]+)\s+(\d+)$", header, re.MULTILINE)
    ordered = {int(number): name for name, number in found}
    return [ordered[number] for number in sorted(ordered)]
