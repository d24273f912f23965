"""A container through the whole kernel layer: what holds inside it, and that nothing stays."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from libhost import command, loop, pidfd
from libhost.cgroup import CgroupLimits, SchedClass
from libhost.command import CommandFailedError
from libhost.crun import ContainerSpec
from libhost.disk import DiskLimits, DiskMode
from libhost.erofs import build_image
from libhost.layer import mount_layer, umount_layer
from libhost.probe import probe_host
from libhost.sweep import find_remains

from .libhost_node import BUILD, LibhostNode, libhost_node, materials


@pytest.fixture
def node(node_name: str, tmp_path: Path) -> Iterator[LibhostNode]:
    with libhost_node(node_name, tmp_path) as node:
        yield node


def test_process_runs_on_its_layers_with_nothing_of_the_host_in_sight(node: LibhostNode) -> None:
    box = node.start()
    assert box.sh("id -u; hostname; cat /proc/self/cgroup | cut -d: -f3 | sort -u") == "0\nbox\n/\n"
    mounts = box.sh("cat /proc/self/mountinfo /proc/mounts")
    assert str(node.directory) not in mounts
    assert node.name not in mounts
    assert box.sh("cat /proc/net/unix | wc -l") == "1\n"
    assert box.sh("ls -A / | grep -c dsec") == "0\n"


def test_first_process_is_the_agent_from_memory(node: LibhostNode) -> None:
    box = node.start()
    executable = Path(f"/proc/{box.container.pid}/exe").readlink()
    assert str(executable).startswith("/memfd:")
    output = {Path(f"/proc/{box.container.pid}/fd/{fd}").readlink() for fd in (0, 1, 2)}
    assert output == {Path("/dev/null")}


def test_nothing_of_the_sandbox_runs_until_its_runtime_is_configured(node: LibhostNode) -> None:
    launch, cgroup, _ = node.launch()
    runtimes = cgroup.process_ids()
    launch.abandon(timeout_s=20)
    assert len(runtimes) <= 1  # the launcher's child, on its way to be crun
    assert not cgroup.is_populated()
    assert not launch.sandbox.pid_file.exists()


def test_a_runtime_ends_with_the_one_who_would_configure_it(node: LibhostNode) -> None:
    launch, cgroup, _ = node.launch()
    os.close(launch.config_fd)  # as the kernel does for a process that is killed
    with pytest.raises(CommandFailedError, match="exited with 1"):
        command.finish(launch.child, timeout_s=20)
    assert not cgroup.is_populated()
    assert not launch.sandbox.pid_file.exists()


def test_nothing_is_left_after_removal(node: LibhostNode) -> None:
    box = node.start(network=True)
    assert set(find_remains(node.host)) == {box.paths.slot}
    assert node.remove(box) == []
    assert find_remains(node.host) == {}
    assert node.remove_again(box) == []


def test_root_mount_is_in_no_table_of_the_host(node: LibhostNode) -> None:
    box = node.start()
    assert str(box.paths.rootfs) not in Path("/proc/self/mountinfo").read_text()
    assert box.sh("echo kept > /note; cat /note") == "kept\n"


def test_memory_limit_kills_and_is_counted(node: LibhostNode) -> None:
    box = node.start(limits=CgroupLimits(memory_mib=32, pids=64))
    said = box.sh("dd if=/dev/zero of=/dev/shm/fill bs=1M count=60 2>&1; echo ended")
    assert "60+0 records out" not in said
    assert box.cgroup.stats().memory.oom_kills >= 1
    assert box.cgroup.stats().memory.peak_bytes <= 32 << 20
    assert pidfd.is_alive(box.container.pidfd)


def test_shared_memory_has_its_own_size(node: LibhostNode) -> None:
    box = node.start(spec=ContainerSpec(hostname="box", shm_mib=4))
    said = box.sh("dd if=/dev/zero of=/dev/shm/fill bs=1M count=8 2>&1 | tail -1; df -k /dev/shm")
    assert "4096" in said
    assert box.sh("wc -c < /dev/shm/fill") == f"{4 << 20}\n"


def test_pids_limit_refuses_forks(node: LibhostNode) -> None:
    box = node.start(limits=CgroupLimits(memory_mib=128, pids=16))
    said = box.sh("for i in $(seq 40); do sleep 30 >/dev/null 2>&1 & done; echo")
    assert "can't fork" in said
    assert box.cgroup.stats().pids_refused >= 1
    assert box.cgroup.stats().pids_current <= 16


def test_cpu_quota_holds(node: LibhostNode) -> None:
    box = node.start(limits=CgroupLimits(memory_mib=128, pids=32, cpus=0.2))
    before = box.cgroup.stats().cpu_usage_us
    box.sh("timeout 1 sh -c 'while :; do :; done'")
    used_us = box.cgroup.stats().cpu_usage_us - before
    assert used_us < 600_000  # of about 1,000,000 without a quota


def test_disk_limit_is_hard_and_statfs_tells_it(node: LibhostNode) -> None:
    box = node.start(disk=DiskLimits(size_mib=24, max_files=2000))
    blocks_kib, inodes = map(int, box.sh("stat -f -c '%b %c' /").split())
    assert 24 * 1024 <= blocks_kib * 4 <= 25 * 1024
    assert 2000 <= inodes <= 2064
    said = box.sh("dd if=/dev/zero of=/fill bs=1M count=40 2>&1")
    assert "No space left" in said or "quota exceeded" in said
    assert 22 << 20 < int(box.sh("wc -c < /fill")) < 26 << 20
    usage = node.host.disk.usage(box.paths)
    assert usage.used_bytes > 22 << 20
    if node.host.disk.mode is DiskMode.LOOP:
        assert box.paths.disk_image.stat().st_blocks * 512 < 30 << 20


def test_file_limit_is_hard(node: LibhostNode) -> None:
    box = node.start(disk=DiskLimits(size_mib=64, max_files=1500))
    said = box.sh("mkdir /many; cd /many; for i in $(seq 3000); do : > f$i || break; done 2>&1")
    assert "No space left" in said or "quota exceeded" in said
    assert int(box.sh("ls /many | wc -l")) < 1600


def test_best_effort_runs_in_its_own_idle_tree(node: LibhostNode) -> None:
    box = node.start(sched=SchedClass.BE)
    tree = node.host.cgroups.layout.cpu / f"dsec-{node.name}" / "be"
    assert (tree / "cpu.idle").read_text() == "1\n"
    assert f"/be/{box.paths.sandbox_id}" in Path(f"/proc/{box.container.pid}/cgroup").read_text()


def test_freeze_stops_and_thaw_continues(node: LibhostNode) -> None:
    box = node.start()
    box.sh("(while :; do echo x >> /ticks; sleep 0.02; done) >/dev/null 2>&1 &")
    box.cgroup.freeze(timeout_s=5)
    assert box.cgroup.is_frozen()
    used = box.cgroup.stats().cpu_usage_us
    for _ in range(20):
        assert box.cgroup.stats().cpu_usage_us - used < 2000
    box.cgroup.thaw()
    before = int(box.sh("wc -l < /ticks"))
    assert int(box.sh("sleep 0.5; wc -l < /ticks")) > before


def test_frozen_sandbox_can_be_removed(node: LibhostNode) -> None:
    box = node.start()
    box.cgroup.freeze(timeout_s=5)
    assert node.remove(box) == []


def test_exit_status_of_a_stranger_is_known(node: LibhostNode) -> None:
    box = node.start()
    pidfd.kill(box.container.pidfd)
    pidfd.wait(box.container.pidfd, timeout_s=5)
    told = pidfd.exit_status(box.container.pidfd)
    forgotten = pidfd.ExitStatus(None, None)
    if probe_host(node.paths.state_dir).pidfd_exit.ok:
        assert told == pidfd.ExitStatus(None, 9)
    else:
        assert told in (pidfd.ExitStatus(None, 9), forgotten)


def test_box_descriptor_ends_at_the_box(node: LibhostNode) -> None:
    box = node.start()
    fd = box.cgroup.open_box()
    try:
        assert os.stat("..", dir_fd=fd).st_ino == os.fstat(fd).st_ino
        assert not {"memory.max", "pids.max"} & set(os.listdir(f"/proc/self/fd/{fd}"))
        os.mkdir("c1", dir_fd=fd)
        assert (box.cgroup.box / "c1").is_dir()
    finally:
        os.close(fd)


def test_layer_page_cache_is_shared_and_writes_are_not(node: LibhostNode) -> None:
    reader, other = node.start(), node.start()
    reader.sh("cat /etc/large > /dev/null")
    pages = resident_pages(Path(f"/proc/{other.container.pid}/root/etc/large"))
    assert pages == {True}
    reader.sh("echo mine > /etc/passwd")
    assert other.sh("cat /etc/passwd").startswith("root:")


def resident_pages(path: Path) -> set[bool]:
    """Whether each page of a file is in the cache, asked without reading it."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        mapped = (ctypes.c_char * size).from_buffer(view)
        answer = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        assert libc.mincore(mapped, ctypes.c_size_t(size), answer) == 0
        del mapped
    return {bool(page & 1) for page in answer}


def test_two_hundred_layers_start_and_the_lowest_is_read(node: LibhostNode, tmp_path: Path) -> None:
    """As one option string they would not fit into the kernel's 4 KiB."""
    extra = []
    for number in range(199):
        tree = tmp_path / f"tree{number}"
        tree.mkdir()
        (tree / f"layer{number}").write_text(str(number))
        build_image(tree, tmp_path / f"{number}.erofs")
        digest = f"{number:064x}"
        extra.append(mount_layer(node.paths, digest, tmp_path / f"{number}.erofs"))
    try:
        box = node.start(above=extra)
        assert int(box.sh("ls / | grep -c layer")) == 199
        assert box.sh("cat /layer198 /etc/passwd").startswith("198root:")
        node.remove(box)
    finally:
        for layer in extra:
            umount_layer(node.paths, layer)


def test_failed_start_names_the_reason_and_can_be_removed(node: LibhostNode) -> None:
    sandbox_id = node.new_id()
    with pytest.raises(CommandFailedError, match="hostname"):
        node.start(sandbox_id=sandbox_id, spec=ContainerSpec(hostname="x" * 100))
    assert [r.sandbox_id for r in find_remains(node.host).values()] == [sandbox_id]


def test_same_sandbox_twice_is_refused(node: LibhostNode) -> None:
    box = node.start()
    with pytest.raises(FileExistsError):
        node.start(sandbox_id=box.paths.sandbox_id)
    assert box.sh("echo alive") == "alive\n"


def test_writable_layer_of_a_live_sandbox_can_be_read(node: LibhostNode) -> None:
    box = node.start()
    box.sh("mkdir /src; echo data > /src/file; rm /etc/passwd")
    layer = node.host.disk.open(box.paths)
    try:
        assert os.stat("src/file", dir_fd=layer.upper.fd).st_size == 5
        whiteout = os.stat("etc/passwd", dir_fd=layer.upper.fd)
        assert (whiteout.st_rdev, oct(whiteout.st_mode)) == (0, "0o20000")
    finally:
        layer.close()
    if node.host.disk.mode is DiskMode.LOOP:
        assert len([1 for _, image in loop.attached() if image == box.paths.disk_image]) == 1


@pytest.mark.skipif(not (BUILD / "aether").exists(), reason="the agent is not built")
def test_real_agent_starts_and_listens(node_name: str, tmp_path: Path) -> None:
    made = dataclasses.replace(materials(), agent=BUILD / "aether")
    node = LibhostNode(node_name, tmp_path, made)
    try:
        box = node.start()
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(10)
            channel.connect(str(box.paths.agent_socket))
            assert channel.recv(1)  # it has settled, and greets
        assert os.readlink(f"/proc/{box.container.pid}/exe").startswith("/memfd:aether")
        assert not [name for name in open_files(box.container.pid) if name.startswith("/memfd:")]
    finally:
        node.close()


def open_files(pid: int) -> list[str]:
    """It runs: what it has closed between the listing and the look is passed over."""
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return names
