"""Cgroups with something in them, and swap of one's own: the ground of the snapshotter's tests."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec.wire.ids import new_incarnation, new_sandbox_id
from libhost import syscall
from libhost.cgroup import CgroupLayout, NodeCgroups, SandboxCgroup, SchedClass
from libhost.cgroupfs import CgroupLimits
from libhost.errors import UnsupportedError
from libhost.paths import NodePaths

_ZRAM = Path("/sys/class/zram-control")
_SWAP_BYTES = 256 << 20
_JOIN = """
import sys
for path in sys.argv[1].split(":"):
    with open(path, "w") as file:
        file.write("0")
"""
_COUNT = """
import mmap, struct
with open(sys.argv[2], "r+b") as file:
    shared = mmap.mmap(file.fileno(), 8)
print("ready", flush=True)
n = 0
while True:
    n += 1
    shared[:] = struct.pack("<Q", n)
"""
_HOLD = """
import hashlib, mmap, os
memory = bytearray(os.urandom(int(sys.argv[2])))
before = hashlib.sha256(memory).hexdigest()
with open(sys.argv[3], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sum(mapped[offset] for offset in range(0, len(mapped), 4096))
print("ready", flush=True)
for line in sys.stdin:
    print(hashlib.sha256(memory).hexdigest() == before, flush=True)
"""
_STAT = """
import os
print("ready", flush=True)
os.stat(sys.argv[2])
"""


class Cgroups:
    """A node's cgroups under a name of its own; all gone afterwards."""

    def __init__(self, directory: Path) -> None:
        self.node = f"t{secrets.token_hex(4)}"
        self.paths = NodePaths(self.node, directory / "state", directory / "run")
        layout = CgroupLayout.detect(Path("/proc/self/mountinfo").read_text())
        self.cgroups = NodeCgroups(layout, self.paths)
        self.cgroups.ensure()
        self._incarnation = new_incarnation()
        self._children: list[subprocess.Popen[str]] = []

    def sandbox(self, memory_mib: int = 512) -> SandboxCgroup:
        sandbox_id = new_sandbox_id(self.node, self._incarnation)
        limits = CgroupLimits(memory_mib=memory_mib, pids=64, swap_max_mib=None)
        return self.cgroups.create(sandbox_id, SchedClass.BE, limits)

    def start(self, cgroup: SandboxCgroup, code: str, *arguments: object) -> subprocess.Popen[str]:
        """A Python program in the cgroup, which has said that it is ready."""
        joins = ":".join(map(str, (*cgroup.join_files, cgroup.box / "cgroup.procs")))
        child = subprocess.Popen(
            [sys.executable, "-c", _JOIN + code, joins, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    def close(self) -> None:
        for sandbox_id in self.cgroups.list_ids():
            cgroup = self.cgroups.open(sandbox_id)
            cgroup.thaw()
            cgroup.kill()
        for child in self._children:
            child.kill()
            child.communicate(timeout=10)
        for sandbox_id in self.cgroups.list_ids():
            cgroup = self.cgroups.open(sandbox_id)
            cgroup.wait_empty(timeout_s=5)
            cgroup.remove()
        self.cgroups.remove()


@contextlib.contextmanager
def node_cgroups(directory: Path) -> Iterator[Cgroups]:
    if os.geteuid() != 0:
        pytest.skip("cgroups need root")
    try:
        cgroups = Cgroups(directory)
    except UnsupportedError as err:
        pytest.skip(str(err))
    try:
        yield cgroups
    finally:
        cgroups.close()


class Counter:
    """A busy process whose count is read from outside."""

    def __init__(self, cgroups: Cgroups, cgroup: SandboxCgroup, file: Path) -> None:
        file.write_bytes(bytes(8))
        self.child = cgroups.start(cgroup, _COUNT, file)
        with file.open("rb") as shared:
            self._shared = mmap.mmap(shared.fileno(), 8, prot=mmap.PROT_READ)

    @property
    def value(self) -> int:
        return int(struct.unpack("<Q", self._shared[:])[0])


class Holder:
    """A process with anonymous memory and mapped file pages, that can prove its memory is whole."""

    def __init__(
        self, cgroups: Cgroups, cgroup: SandboxCgroup, file: Path, anon_bytes: int
    ) -> None:
        self.child = cgroups.start(cgroup, _HOLD, anon_bytes, file)

    def is_whole(self) -> bool:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write("check\n")
        self.child.stdin.flush()
        return self.child.stdout.readline() == "True\n"


@contextlib.contextmanager
def silent_file_system(mount_point: Path) -> Iterator[Path]:
    """A FUSE mount whose server never answers: who touches it waits in the kernel."""
    mount_point.mkdir()
    try:
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as err:
        pytest.skip(f"/dev/fuse: {err}")
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0"
    syscall.mount("dsec-silent", str(mount_point), "fuse", 0, options)
    try:
        yield mount_point
    finally:
        syscall.umount2(str(mount_point), syscall.MNT_DETACH)
        os.close(fuse)


def start_blocked(
    cgroups: Cgroups, cgroup: SandboxCgroup, mount_point: Path
) -> subprocess.Popen[str]:
    return cgroups.start(cgroup, _STAT, mount_point / "x")


@contextlib.contextmanager
def own_swap() -> Iterator[None]:
    """A zram device made for this test and taken away again."""
    if not (_ZRAM / "hot_add").exists():
        pytest.skip("no zram-control: swap of one's own cannot be made")
    number = (_ZRAM / "hot_add").read_text().strip()
    device = f"/dev/zram{number}"
    try:
        Path(f"/sys/block/zram{number}/disksize").write_text(str(_SWAP_BYTES))
        subprocess.run(["mkswap", device], check=True, capture_output=True, timeout=10)
        subprocess.run(["swapon", device], check=True, capture_output=True, timeout=10)
        yield
    finally:
        subprocess.run(["swapoff", device], check=False, capture_output=True, timeout=30)
        Path(f"/sys/block/zram{number}/reset").write_text("1")
        (_ZRAM / "hot_remove").write_text(number)
