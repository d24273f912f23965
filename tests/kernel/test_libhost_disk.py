"""Loop disks: exact sizes, a pool that hides their cost, nothing that outlives its user."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from libhost import loop
from libhost.disk import DiskLimits, DiskMode, empty_trash, open_disk
from libhost.disk_loop import LoopDisk
from libhost.overlay import OverlayMode, apply, plan_overlay
from libhost.paths import NodePaths
from libhost.probe import probe_host
from libhost.writable import Place, usage_of

SMALL = DiskLimits(size_mib=16)


@pytest.fixture
def paths(node_name: str, tmp_path: Path) -> NodePaths:
    return NodePaths(node_name, tmp_path / "state", tmp_path / "run")


@pytest.fixture
def best(paths: NodePaths) -> OverlayMode:
    mode = probe_host(paths.state_dir).overlay
    assert mode is not None
    return mode


@pytest.fixture
def disk(paths: NodePaths, best: OverlayMode) -> Iterator[LoopDisk]:
    disk = LoopDisk(paths, best, pool_size=2)
    try:
        yield disk
    finally:
        disk.close()


def images_of(paths: NodePaths) -> list[Path]:
    return [image for _, image in loop.attached() if image.is_relative_to(paths.state_dir)]


def soon(condition: Callable[[], bool]) -> bool:
    """The kernel frees a loop device a moment after its last user."""
    deadline = time.monotonic() + 5
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("size_mib", [8, 64, 1000, 20_000])
@pytest.mark.parametrize("files", [None, 1500, 50_000])
def test_usable_size_is_what_was_asked_for(
    paths: NodePaths, disk: LoopDisk, size_mib: int, files: int | None
) -> None:
    limits = DiskLimits(size_mib, files)
    sandbox = paths.sandbox("n_aaaaaa_size")
    layer = disk.create(sandbox, limits)
    usage = usage_of(layer.root_fd)
    layer.close()
    assert size_mib << 20 <= usage.limit_bytes <= (size_mib << 20) * 1.05
    groups = size_mib // 128 + 1  # ext4 rounds up to 16 files in each
    assert limits.files <= usage.limit_files <= limits.files + 16 * groups
    assert sandbox.disk_image.stat().st_blocks * 512 < 2 << 20  # sparse


def test_prepared_disks_are_taken_first_and_given_back(paths: NodePaths, disk: LoopDisk) -> None:
    assert [disk.refill([SMALL], at_most=1) for _ in range(3)] == [1, 1, 0]
    prepared = set(images_of(paths))
    layer = disk.create(paths.sandbox("n_aaaaaa_one"), SMALL)
    assert len(prepared & set(images_of(paths))) == 1
    other = DiskLimits(size_mib=24)
    assert disk.refill([other], at_most=8) == 2  # the first size is no longer wanted
    layer.close()
    disk.close()
    assert soon(lambda: not images_of(paths))
    assert not list(paths.disks_dir.glob("*.img"))


def test_second_disk_of_a_sandbox_is_refused(paths: NodePaths, disk: LoopDisk) -> None:
    sandbox = paths.sandbox("n_aaaaaa_twice")
    disk.create(sandbox, SMALL).close()
    with pytest.raises(FileExistsError):
        disk.create(sandbox, SMALL)


def test_what_was_written_is_there_when_opened_again(paths: NodePaths, disk: LoopDisk) -> None:
    sandbox = paths.sandbox("n_aaaaaa_again")
    layer = disk.create(sandbox, SMALL)
    os.mkdir("kept", dir_fd=layer.upper.fd)
    layer.close()
    assert soon(lambda: not images_of(paths))
    again = disk.open(sandbox)
    assert "kept" in os.listdir(f"/proc/self/fd/{again.upper.fd}")
    again.close()


def test_discarded_disk_goes_to_the_trash_at_the_pace_asked(
    paths: NodePaths, disk: LoopDisk
) -> None:
    sandbox = paths.sandbox("n_aaaaaa_gone")
    disk.create(sandbox, SMALL).close()
    (sandbox.state_dir / "deep").mkdir()
    for name in range(10):
        (sandbox.state_dir / "deep" / str(name)).touch()
    (sandbox.state_dir / "link").symlink_to("/etc")
    while empty_trash(paths, budget_files=1000):  # what the pool of a predecessor left
        pass
    disk.discard(sandbox)
    disk.discard(sandbox)
    assert not sandbox.state_dir.exists()
    assert empty_trash(paths, budget_files=4) == 4
    assert 0 < empty_trash(paths, budget_files=1000) < 20
    assert list(paths.trash_dir.iterdir()) == []
    assert Path("/etc/passwd").exists()


def test_successor_drops_what_its_predecessor_prepared(paths: NodePaths, disk: LoopDisk) -> None:
    disk.refill([SMALL], at_most=8)
    successor = open_disk(paths, DiskMode.LOOP, OverlayMode.SET_FD, pool_size=1)
    assert list(paths.disks_dir.iterdir()) == []
    successor.close()


@pytest.mark.parametrize("mode", list(OverlayMode))
def test_overlay_keeps_the_disk_alive_in_every_mode(
    paths: NodePaths, tmp_path: Path, mode: OverlayMode, best: OverlayMode
) -> None:
    order = list(OverlayMode)
    if order.index(mode) < order.index(best):
        pytest.skip(f"this kernel takes {best} at best")
    lower = tmp_path / "lower"
    lower.mkdir()
    (lower / "below").write_text("x")
    disk = LoopDisk(paths, mode, pool_size=1)
    layer = disk.create(paths.sandbox("n_aaaaaa_mode"), SMALL)
    base = Place(os.open(lower, os.O_PATH | os.O_DIRECTORY), lower)
    root = apply(plan_overlay([base], layer.upper, layer.work, mode))
    layer.close()
    os.close(base.fd)
    assert str(paths.state_dir) not in Path("/proc/self/mountinfo").read_text()
    try:
        os.rename("below", "above", src_dir_fd=root, dst_dir_fd=root)
        assert os.listdir(f"/proc/self/fd/{root}") == ["above"]
        assert len(images_of(paths)) == 1
    finally:
        os.close(root)
        disk.close()
    assert soon(lambda: not images_of(paths))


def test_directory_of_a_layer_can_be_renamed(
    paths: NodePaths, disk: LoopDisk, best: OverlayMode, tmp_path: Path
) -> None:
    """Without redirect_dir it is EXDEV, and `git mv` of a directory fails."""
    lower = tmp_path / "lower"
    (lower / "old/deep").mkdir(parents=True)
    layer = disk.create(paths.sandbox("n_aaaaaa_rename"), SMALL)
    base = Place(os.open(lower, os.O_PATH | os.O_DIRECTORY), lower)
    root = apply(plan_overlay([base], layer.upper, layer.work, best))
    try:
        os.rename("old", "new", src_dir_fd=root, dst_dir_fd=root)
        assert os.stat("new/deep", dir_fd=root)
    finally:
        for fd in (root, base.fd):
            os.close(fd)
        layer.close()


def test_failed_mount_says_why(
    paths: NodePaths, disk: LoopDisk, best: OverlayMode, tmp_path: Path
) -> None:
    lower = tmp_path / "lower"
    lower.mkdir()
    layer = disk.create(paths.sandbox("n_aaaaaa_fail"), SMALL)
    base = Place(os.open(lower, os.O_PATH | os.O_DIRECTORY), lower)
    try:
        with pytest.raises(OSError, match=r"overlapping|loop|Invalid"):
            apply(plan_overlay([base], layer.upper, layer.upper, best))
    finally:
        os.close(base.fd)
        layer.close()
