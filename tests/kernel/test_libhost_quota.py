"""Project quota as the limit of a writable layer, where the kernel has it, and the ways round it.

Works on a file system of its own: an ext4 image mounted with ``prjquota`` on a loop device.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from libhost import command, disk_quota, loop, syscall
from libhost.disk import DiskLimits, DiskMode, empty_trash, open_disk
from libhost.disk_quota import QuotaDisk, has_project_quota
from libhost.paths import NodePaths
from libhost.probe import probe_host

from .libhost_node import LibhostNode, materials


@pytest.fixture
def quota_fs(tmp_path: Path) -> Iterator[Path]:
    image, target = tmp_path / "quota.img", tmp_path / "fs"
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)
    options = ["-O", "quota,project", "-E", "quotatype=prjquota"]
    command.run(["mkfs.ext4", "-q", "-F", *options, str(image)], timeout_s=60)
    fd, device = loop.attach(image)
    try:
        syscall.mount(str(device), str(target), "ext4", 0, "prjquota")
    except OSError as err:
        pytest.skip(f"no project quota in this kernel: {err}")
    finally:
        os.close(fd)
    try:
        yield target
    finally:
        syscall.umount2(str(target), syscall.MNT_DETACH)


@pytest.fixture
def paths(node_name: str, quota_fs: Path, tmp_path: Path) -> NodePaths:
    return NodePaths(node_name, quota_fs, tmp_path / "run")


def test_directory_without_quota_is_seen_as_such(tmp_path: Path) -> None:
    assert not has_project_quota(Path("/dev/shm"))


def test_probe_prefers_quota_where_it_is(quota_fs: Path) -> None:
    assert has_project_quota(quota_fs)
    assert probe_host(quota_fs).disk is DiskMode.QUOTA


def test_limit_is_per_sandbox_and_usage_is_told(paths: NodePaths) -> None:
    disk = QuotaDisk(paths)
    one, other = paths.sandbox("n_aaaaaa_one"), paths.sandbox("n_aaaaaa_two")
    for sandbox in (one, other):
        disk.create(sandbox, DiskLimits(size_mib=16, max_files=100)).close()
    (one.disk_dir / "upper/file").write_bytes(bytes(4 << 20))
    assert disk.usage(one).used_bytes >= 4 << 20
    assert disk.usage(one).limit_bytes == 16 << 20
    assert disk.usage(other).used_bytes < 1 << 20
    assert disk.usage(one).limit_files == 100
    assert project_of(one.disk_dir) != project_of(other.disk_dir)


def project_of(directory: Path) -> int:
    fd = os.open(directory, os.O_RDONLY)
    try:
        return disk_quota._project_of(fd)
    finally:
        os.close(fd)


def test_discarded_project_is_free_again(paths: NodePaths) -> None:
    disk = QuotaDisk(paths)
    sandbox = paths.sandbox("n_aaaaaa_one")
    for _ in range(2):
        disk.create(sandbox, DiskLimits(size_mib=16)).close()
        project = project_of(sandbox.disk_dir)
        disk.discard(sandbox)
        disk.discard(sandbox)
        while empty_trash(paths, budget_files=100):
            pass
        fd = os.open(paths.state_dir, 0)
        assert disk_quota._get_quota(fd, project).unused
        os.close(fd)


@pytest.fixture
def node(paths: NodePaths, tmp_path: Path) -> Iterator[LibhostNode]:
    node = LibhostNode(paths.node, tmp_path, materials())
    node.host.disk.close()
    quota = open_disk(paths, DiskMode.QUOTA, node.mode)
    node.paths = replace(node.paths, state_dir=paths.state_dir)
    node.host = replace(node.host, paths=node.paths, disk=quota)
    try:
        yield node
    finally:
        node.close()


def test_root_inside_meets_the_limit_and_finds_no_way_round(node: LibhostNode) -> None:
    box = node.start(disk=DiskLimits(size_mib=16, max_files=200))
    said = box.sh("dd if=/dev/zero of=/fill bs=1M count=40 2>&1")
    assert "quota" in said.lower() or "No space" in said
    assert int(box.sh("wc -c < /fill")) <= 16 << 20
    assert box.sh("df -m / | tail -1").split()[1] == "16"
    box.sh("rm /fill; mkdir /d; chattr -P /d; chattr -p 0 /d")
    assert box.reach("fssetxattr") == "EPERM"
    assert box.reach("setflags") == "EOPNOTSUPP"
    said = box.sh(
        "dd if=/dev/zero of=/d/fill bs=1M count=40 2>&1; for i in $(seq 400); do : > /d/$i; done"
    )
    assert int(box.sh("wc -c < /d/fill")) <= 16 << 20
    assert int(box.sh("ls /d | wc -l")) <= 200


def test_without_the_filter_clearing_a_flag_escapes(paths: NodePaths) -> None:
    """Why FS_IOC_SETFLAGS is refused: what is made below a directory that does not pass its project
    on belongs to nobody's quota."""
    disk = QuotaDisk(paths)
    sandbox = paths.sandbox("n_aaaaaa_one")
    disk.create(sandbox, DiskLimits(size_mib=4)).close()
    loose = sandbox.disk_dir / "upper/loose"
    loose.mkdir()
    fd = os.open(loose, os.O_RDONLY)
    flags = bytearray(8)
    fcntl.ioctl(fd, 0x80086601, flags)
    cleared = int.from_bytes(flags, "little") & ~0x20000000
    fcntl.ioctl(fd, 0x40086602, cleared.to_bytes(8, "little"))
    before = disk.usage(sandbox).used_bytes
    (loose / "file").write_bytes(bytes(2 << 20))
    os.sync()
    assert disk.usage(sandbox).used_bytes - before < 1 << 20
    os.close(fd)
