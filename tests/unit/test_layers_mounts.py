"""LayerMounts: one mount per digest, references by sandbox, whatever races and fails."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from libdsec.errors import DataLoss, Unavailable, Unsupported
from libdsec.wire.layer import LayerInfo, LayerKind, ResolvedLayers
from libhost.aio import HostThreads
from libhost.layer import MountedLayer
from services.chassis.clock import Clock
from services.edge.layers.mounts import LayerMounts
from services.edge.layers.store import DirectoryStore

GRACE_S = 100.0


class SetClock(Clock):
    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


class RecordingMounter:
    """Counts, and fails or waits when told to; `existing` is what a predecessor left."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.umounts: Counter[str] = Counter()
        self.existing: dict[str, MountedLayer] = {}
        self.failure: OSError | None = None
        self.go = threading.Event()
        self.go.set()

    def mount(self, digest: str, image: Path) -> MountedLayer:
        self.calls[digest] += 1
        assert self.go.wait(10)
        if self.failure is not None:
            raise self.failure
        return MountedLayer(digest, Path("/layers") / digest, -1)

    def mounted(self) -> Mapping[str, MountedLayer]:
        return self.existing

    def umount(self, layer: MountedLayer) -> None:
        self.umounts[layer.digest] += 1


class Node:
    def __init__(self, directory: Path) -> None:
        self.clock = SetClock()
        self.store = DirectoryStore(directory / "store", self.clock)
        self.mounter = RecordingMounter()
        self.threads = HostThreads(4)
        self.mounts = self.restarted()

    def restarted(self) -> LayerMounts:
        return LayerMounts(
            self.mounter, self.store, self.threads, idle_grace_s=GRACE_S, clock=self.clock
        )

    def layer(self, name: str) -> LayerInfo:
        data = name.encode()
        with self.store.staging() as work:
            (work / "image").write_bytes(data)
            stored = self.store.put(work / "image")
        return LayerInfo(
            space="p", name=name, version="1", digest=stored.digest, kind=LayerKind.BASE,
            size_bytes=len(data), files=1, created_at=0.0,
        )  # fmt: skip


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    yield node
    node.mounter.go.set()
    await node.mounts.close()
    node.threads.close()


async def test_many_acquirers_at_once_share_one_mount(node: Node) -> None:
    base = node.layer("base")
    node.mounter.go.clear()
    acquirers = [
        asyncio.create_task(node.mounts.acquire(f"s{n}", ResolvedLayers(base=base)))
        for n in range(50)
    ]
    await asyncio.sleep(0.05)
    node.mounter.go.set()
    stacks = await asyncio.gather(*acquirers)
    assert node.mounter.calls == {base.digest: 1}
    assert {stack.digests for stack in stacks} == {(base.digest,)}
    assert len(node.mounts.users_of(base.digest)) == 50


async def test_lowers_run_from_base_to_the_last_toolkit_each_digest_once(node: Node) -> None:
    base, work, tool = node.layer("base"), node.layer("work"), node.layer("tool")
    resolved = ResolvedLayers(base=base, workspace=work, toolkits=(tool, work))
    stack = await node.mounts.acquire("s", resolved)
    assert stack.digests == (base.digest, tool.digest, work.digest)


async def test_a_cancelled_acquirer_takes_no_mount_from_the_others(node: Node) -> None:
    base = node.layer("base")
    node.mounter.go.clear()
    first = asyncio.create_task(node.mounts.acquire("first", ResolvedLayers(base=base)))
    second = asyncio.create_task(node.mounts.acquire("second", ResolvedLayers(base=base)))
    await asyncio.sleep(0.05)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    node.mounter.go.set()
    assert (await second).digests == (base.digest,)
    assert node.mounter.calls == {base.digest: 1}
    assert node.mounts.users_of(base.digest) == {"second"}


async def test_idle_layers_are_unmounted_after_the_grace_time_and_used_ones_are_not(
    node: Node,
) -> None:
    idle, used = node.layer("idle"), node.layer("used")
    await node.mounts.acquire("a", ResolvedLayers(base=used, toolkits=(idle,)))
    await node.mounts.acquire("b", ResolvedLayers(base=used))
    await node.mounts.release("a")
    await node.mounts.release("a")
    node.clock.now_s = GRACE_S - 1
    assert await node.mounts.sweep() == 0
    node.clock.now_s = GRACE_S
    assert await node.mounts.sweep() == 1
    assert node.mounter.umounts == {idle.digest: 1}
    assert node.mounts.mounted == {used.digest}
    await node.mounts.acquire("c", ResolvedLayers(base=idle))
    assert node.mounter.calls[idle.digest] == 2


async def test_trim_unmounts_all_that_is_idle_now(node: Node) -> None:
    base = node.layer("base")
    await node.mounts.acquire("a", ResolvedLayers(base=base))
    assert await node.mounts.trim() == 0
    await node.mounts.release("a")
    assert await node.mounts.trim() == 1
    assert node.mounts.mounted == frozenset()


async def test_a_successor_adopts_mounts_and_references_and_mounts_nothing_again(
    node: Node,
) -> None:
    base, tool, left = node.layer("base"), node.layer("tool"), node.layer("left")
    first = await node.mounts.acquire("a", ResolvedLayers(base=base, toolkits=(tool,)))
    unused = await node.mounts.acquire("b", ResolvedLayers(base=left))
    node.mounter.existing = {layer.digest: layer for layer in (*first.lowers, *unused.lowers)}
    successor = node.restarted()
    assert await successor.adopt({"a": first.digests, "gone": ("f" * 64,)}) == ("f" * 64,)
    assert successor.users_of(base.digest) == {"a"}
    await successor.acquire("c", ResolvedLayers(base=base, toolkits=(tool,)))
    assert node.mounter.calls[base.digest] == 1
    node.clock.now_s = GRACE_S
    assert await successor.sweep() == 1
    assert node.mounter.umounts == {left.digest: 1}


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOTBLK, Unsupported), (errno.EIO, Unavailable)]
)
async def test_a_failed_mount_names_the_layer_and_leaves_nothing_referenced(
    node: Node, number: int, kind: type[Exception]
) -> None:
    base = node.layer("base")
    node.mounter.failure = OSError(number, os.strerror(number))
    with pytest.raises(kind, match="p/base@1"):
        await node.mounts.acquire("a", ResolvedLayers(base=base))
    assert node.mounts.users_of(base.digest) == frozenset()
    node.mounter.failure = None
    await node.mounts.acquire("a", ResolvedLayers(base=base))


async def test_a_missing_or_damaged_image_is_data_loss_and_is_not_mounted(node: Node) -> None:
    missing = node.layer("base").model_copy(update={"digest": "a" * 64})
    with pytest.raises(DataLoss, match=r"layer p/base@1 is not in this node's store"):
        await node.mounts.acquire("a", ResolvedLayers(base=missing))
    damaged = node.layer("damaged")
    path = node.store.path(damaged.digest)
    path.chmod(0o644)
    path.write_bytes(b"DAMAGED")
    with pytest.raises(DataLoss, match="p/damaged@1 is damaged"):
        await node.mounts.acquire("a", ResolvedLayers(base=damaged))
    assert not node.mounter.calls


async def test_a_failed_second_acquire_keeps_what_the_sandbox_had(node: Node) -> None:
    base, tool = node.layer("base"), node.layer("tool")
    await node.mounts.acquire("a", ResolvedLayers(base=base))
    node.mounter.failure = OSError(errno.EIO, "no")
    with pytest.raises(Unavailable):
        await node.mounts.acquire("a", ResolvedLayers(base=base, toolkits=(tool,)))
    assert node.mounts.users_of(base.digest) == {"a"}
    assert node.mounts.users_of(tool.digest) == frozenset()
