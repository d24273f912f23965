"""Layers really mounted: once, shared down to the page cache, found again by a successor."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec.errors import DataLoss
from libdsec.wire.layer import LayerInfo, LayerKind, ResolvedLayers
from libhost import syscall
from libhost.aio import HostThreads
from libhost.erofs import build_image
from libhost.layer import mounted_layers, umount_layer
from libhost.paths import NodePaths
from services.chassis.clock import Clock
from services.edge.layers.mounts import LayerMounts, NodeMounter
from services.edge.layers.store import DirectoryStore

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root"),
    pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed"),
]

FILE_BYTES = 4 << 20


class Node:
    def __init__(self, directory: Path) -> None:
        self.paths = NodePaths("t", directory / "state", directory / "run")
        self.store = DirectoryStore(directory / "store", Clock())
        self.threads = HostThreads(4)
        self.mounts = self.started()

    def started(self) -> LayerMounts:
        return LayerMounts(NodeMounter(self.paths), self.store, self.threads, clock=Clock())

    def layer(self, name: str) -> LayerInfo:
        with self.store.staging() as work:
            (work / "tree").mkdir()
            (work / "tree" / "file").write_bytes(random.Random(name).randbytes(FILE_BYTES))
            build_image(work / "tree", work / "image")
            stored = self.store.put(work / "image")
        return LayerInfo(
            space="p", name=name, version="1", digest=stored.digest, kind=LayerKind.BASE,
            size_bytes=stored.size_bytes, files=1, created_at=0.0,
        )  # fmt: skip


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    yield node
    await node.mounts.close()
    node.threads.close()
    for layer in mounted_layers(node.paths).values():
        umount_layer(node.paths, layer)
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def mount_count(node: Node, digest: str) -> int:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return sum(f"{node.paths.layer_mount(digest)} " in line for line in lines)


def resident_bytes(path: Path) -> int:
    """How much of a file is in the page cache: mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = path.stat().st_size
    with path.open("rb") as file:
        address = libc.mmap(
            None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(),
            ctypes.c_long(0),
        )  # fmt: skip
    pages = (ctypes.c_ubyte * ((size + mmap.PAGESIZE - 1) // mmap.PAGESIZE))()
    try:
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


async def test_many_at_once_make_one_mount_and_a_successor_makes_none(node: Node) -> None:
    base = node.layer("base")
    resolved = ResolvedLayers(base=base)
    stacks = await asyncio.gather(*(node.mounts.acquire(f"s{n}", resolved) for n in range(40)))
    assert mount_count(node, base.digest) == 1
    successor = node.started()
    assert await successor.adopt({"s0": stacks[0].digests}) == ()
    stack = await successor.acquire("s1", resolved)
    assert (stack.lowers[0].path / "file").stat().st_size == FILE_BYTES
    assert mount_count(node, base.digest) == 1
    await successor.release("s0")
    await successor.release("s1")
    assert await successor.trim() == 1
    assert mount_count(node, base.digest) == 0
    await successor.close()


async def test_sandboxes_share_the_pages_of_a_layer(node: Node) -> None:
    """What an overlay does with a lower layer is a clone of its mount."""
    base = node.layer("base")
    stack = await node.mounts.acquire("s", ResolvedLayers(base=base))
    clones = [
        syscall.open_tree(syscall.AT_FDCWD, str(stack.lowers[0].path), syscall.OPEN_TREE_CLONE)
        for _ in range(2)
    ]
    try:
        one, other = (Path(f"/proc/self/fd/{fd}/file") for fd in clones)
        assert resident_bytes(other) == 0
        one.read_bytes()
        assert resident_bytes(other) == FILE_BYTES
    finally:
        for fd in clones:
            os.close(fd)


async def test_a_layer_is_read_only_and_has_no_devices(node: Node) -> None:
    stack = await node.mounts.acquire("s", ResolvedLayers(base=node.layer("base")))
    with pytest.raises(OSError, match="Read-only") as refusal:
        (stack.lowers[0].path / "new").touch()
    assert refusal.value.errno == errno.EROFS
    options = next(
        line.split()[5]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if str(stack.lowers[0].path) in line
    )
    assert {"ro", "nodev"} <= set(options.split(","))


async def test_unmounting_leaves_a_reader_its_files(node: Node) -> None:
    base = node.layer("base")
    stack = await node.mounts.acquire("s", ResolvedLayers(base=base))
    with (stack.lowers[0].path / "file").open("rb") as reader:
        await node.mounts.release("s")
        assert await node.mounts.trim() == 1
        assert reader.read() == random.Random("base").randbytes(FILE_BYTES)


async def test_a_damaged_image_is_not_mounted(node: Node) -> None:
    base = node.layer("base")
    image = node.store.path(base.digest)
    image.chmod(0o644)
    with image.open("r+b") as file:
        file.seek(base.size_bytes // 2)
        file.write(b"\0" * 16)
    with pytest.raises(DataLoss, match="p/base@1 is damaged"):
        await node.mounts.acquire("s", ResolvedLayers(base=base))
    assert mount_count(node, base.digest) == 0


async def test_a_warm_acquire_waits_for_nothing(node: Node) -> None:
    """No thread, no system call: it is over when it is first stepped."""
    resolved = ResolvedLayers(base=node.layer("base"), toolkits=(node.layer("tool"),))
    await node.mounts.acquire("first", resolved)
    with pytest.raises(StopIteration) as ended:
        node.mounts.acquire("second", resolved).send(None)
    assert ended.value.value.digests == (resolved.base.digest, resolved.toolkits[0].digest)
