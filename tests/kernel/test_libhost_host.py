"""The host itself: what the probe finds, images, memory taken back, joining quickly."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from libhost import erofs, memory, sched
from libhost.command import CommandFailedError
from libhost.errors import UnsupportedError
from libhost.probe import Finding, HostCapabilities, probe_host

from .libhost_node import LibhostNode, libhost_node
from .paused import own_swap


@pytest.fixture
def node(node_name: str, tmp_path: Path) -> Iterator[LibhostNode]:
    with libhost_node(node_name, tmp_path) as node:
        yield node


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostCapabilities:
    return probe_host(tmp_path_factory.mktemp("probe"))


def test_probe_finds_a_usable_host_and_leaves_nothing(tmp_path: Path) -> None:
    found = probe_host(tmp_path)
    assert found.problems == ()
    assert list(tmp_path.iterdir()) == []
    assert probe_host(tmp_path) is found
    assert all(value.reason for value in vars(found).values() if isinstance(value, Finding))


def test_lack_is_named_as_a_problem(host: HostCapabilities) -> None:
    lacking = replace(host, disk=None, disk_reason="tried in vain")
    assert lacking.problems == ("limited disk: tried in vain",)


def test_same_tree_gives_the_same_image(tmp_path: Path) -> None:
    images = []
    for order in ("abc", "cba"):
        tree = tmp_path / order / "tree"
        tree.mkdir(parents=True)
        for name in order:
            (tree / name).write_text(name)
            os.utime(tree / name, (1e9, 1e9))
        os.utime(tree, (1e9, 1e9))
        erofs.build_image(tree, tmp_path / order / "image")
        images.append((tmp_path / order / "image").read_bytes())
    assert images[0] == images[1]


def test_image_keeps_times_and_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("x")
    os.utime(tmp_path / "tree/file", (1234567890, 1234567890))
    erofs.build_image(tmp_path / "tree", tmp_path / "image")
    fd = erofs.mount_image(tmp_path / "image")
    try:
        assert os.stat("file", dir_fd=fd).st_mtime == 1234567890
        with pytest.raises(OSError, match="Read-only"):
            os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    finally:
        os.close(fd)


def test_damaged_image_is_found(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_bytes(os.urandom(100_000))
    image = tmp_path / "image"
    erofs.build_image(tmp_path / "tree", image)
    erofs.check_image(image)
    with image.open("r+b") as file:
        file.seek(1024)
        file.write(b"\0" * 64)
    with pytest.raises(CommandFailedError):
        erofs.check_image(image)


def test_image_on_memory_is_refused_with_the_way_out(tmp_path: Path) -> None:
    image = Path(f"/dev/shm/dsec-{tmp_path.name}.erofs")
    (tmp_path / "tree").mkdir()
    try:
        erofs.build_image(tmp_path / "tree", image)
        with pytest.raises(OSError, match="not on tmpfs") as caught:
            os.close(erofs.mount_image(image))
        assert caught.value.errno == errno.ENOTBLK
    finally:
        image.unlink(missing_ok=True)


def test_page_cache_is_taken_back_from_a_frozen_sandbox(
    node: LibhostNode, host: HostCapabilities
) -> None:
    box = node.start()
    box.sh("dd if=/dev/zero of=/file bs=1M count=40; sync; cat /file > /dev/null")
    assert box.cgroup.stats().memory.file_bytes > 30 << 20
    box.cgroup.freeze(timeout_s=5)
    done = memory.reclaim(box.cgroup, host, timeout_s=20)
    assert done.file_bytes > 25 << 20
    assert box.cgroup.stats().memory.file_bytes < 15 << 20
    if not host.swap.ok and not host.memory_reclaim.ok:
        assert (done.way, done.swapped_bytes) == (memory.ReclaimWay.FILE_ONLY, 0)
    box.cgroup.thaw()
    assert box.sh("wc -c < /file") == f"{40 << 20}\n"


def test_anonymous_memory_goes_to_swap_and_comes_back(
    node: LibhostNode, host: HostCapabilities
) -> None:
    box = node.start()
    held = (
        "x=$(head -c 20000000 /dev/zero | tr '\\000' a); echo ready > /ready; sleep 60; echo ${#x}"
    )
    box.sh(f"({held}) > /length 2>&1 & until [ -s /ready ]; do sleep 0.05; done")
    box.cgroup.freeze(timeout_s=5)
    with own_swap():
        done = memory.reclaim(box.cgroup, host, timeout_s=30)
        assert done.way in (memory.ReclaimWay.PAGEOUT, memory.ReclaimWay.MEMORY_RECLAIM)
        assert done.swapped_bytes > 10 << 20
        assert memory.prefetch(box.cgroup, timeout_s=30) > 10 << 20
        box.cgroup.thaw()
        node.remove(box)


def test_reclaim_that_is_impossible_says_so(node: LibhostNode, host: HostCapabilities) -> None:
    no = Finding(False, "not here")
    box = node.start()
    with pytest.raises(UnsupportedError, match="not here"):
        memory.reclaim(
            box.cgroup, replace(host, memory_reclaim=no, process_madvise=no), timeout_s=1
        )


def test_deadline_of_a_prefetch_is_kept(node: LibhostNode) -> None:
    box = node.start()
    with pytest.raises(TimeoutError):
        memory.prefetch(box.cgroup, timeout_s=0)


def test_core_cookies_are_refused_where_there_are_none(host: HostCapabilities) -> None:
    if host.core_scheduling.ok:
        pytest.skip("this kernel has core scheduling")
    with pytest.raises(UnsupportedError, match="core scheduling"):
        sched.new_cookie([])
