"""Which cgroup layout a mount table describes; limits in both dialects, on plain files."""

from __future__ import annotations

from pathlib import Path

import pytest

from libhost import cgroupfs
from libhost.cgroup import CgroupLayout, CgroupLimits
from libhost.errors import UnsupportedError

UNIFIED = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = "\n".join(
    [
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
        "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755",
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
        "34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset",
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory",
        "39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids",
        "40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd",
        "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw",
    ]
)
TOP = Path("/sys/fs/cgroup")


def test_unified_is_one_directory_for_everything() -> None:
    layout = CgroupLayout.detect(UNIFIED)
    assert layout == CgroupLayout(TOP, TOP, TOP, TOP)
    assert (layout.hybrid, layout.hierarchies) == (False, (TOP,))


def test_hybrid_finds_each_controller_and_v2_last() -> None:
    layout = CgroupLayout.detect(HYBRID)
    assert layout.hybrid
    assert layout.cpu == TOP / "cpu,cpuacct"
    assert layout.hierarchies[-1] == TOP / "unified"
    assert len(layout.hierarchies) == 4


def test_part_of_a_hierarchy_bound_elsewhere_is_passed_over() -> None:
    bound = "99 1 0:28 /machine.slice /mnt/cg rw - cgroup2 cgroup2 rw\n" + UNIFIED
    assert CgroupLayout.detect(bound).unified == TOP


def test_v1_without_a_v2_tree_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="no cgroup2"):
        CgroupLayout.detect(HYBRID.rsplit("\n", 1)[0])


def test_missing_v1_controller_is_named() -> None:
    without = "\n".join(line for line in HYBRID.splitlines() if "pids" not in line)
    with pytest.raises(UnsupportedError, match="pids"):
        CgroupLayout.detect(without)


def files(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).touch()
    return directory


def test_limits_in_v2_words(tmp_path: Path) -> None:
    path = files(tmp_path, "memory.max", "memory.swap.max", "cpu.weight", "cpu.max")
    cgroupfs.write_limits_v2(path, path, CgroupLimits(512, 100, cpus=1.5, cpu_weight=150))
    assert (path / "memory.max").read_text() == str(512 << 20)
    assert (path / "memory.swap.max").read_text() == "0"
    assert (path / "cpu.max").read_text() == "150000 100000"
    assert (path / "cpu.weight").read_text() == "150"


def test_limits_in_v1_words(tmp_path: Path) -> None:
    names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.swappiness")
    path = files(tmp_path, *names, "cpu.shares", "cpu.cfs_quota_us")
    cgroupfs.write_limits_v1(path, path, CgroupLimits(512, 100, cpus=0.001))
    assert (path / "memory.memsw.limit_in_bytes").read_text() == str(512 << 20)
    assert (path / "memory.swappiness").read_text() == "0"
    assert (path / "cpu.shares").read_text() == "1024"
    assert (path / "cpu.cfs_quota_us").read_text() == "1000"  # the least the kernel takes


def test_no_quota_is_said_in_both(tmp_path: Path) -> None:
    path = files(tmp_path, "memory.max", "cpu.weight", "cpu.max")
    cgroupfs.write_limits_v2(path, path, CgroupLimits(64, 10))
    assert (path / "cpu.max").read_text() == "max 100000"


def test_refused_write_names_file_and_value(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"writing 7") as caught:
        cgroupfs.write(Path("/dev/full"), "7")
    assert caught.value.filename == "/dev/full"
