"""Pause and resume of real processes: they stand still, give memory back, and go on unharmed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec.wire.snapshot import Frozen, Thawed
from libhost.cgroup import SandboxCgroup
from libhost.probe import HostCapabilities, probe_host
from services.snapshotter.pause import NotFrozenError, Pauser

from .paused import (
    Cgroups,
    Counter,
    Holder,
    node_cgroups,
    own_swap,
    silent_file_system,
    start_blocked,
)

pytestmark = pytest.mark.kernel

MIB = 1 << 20
ANON = 48 * MIB
FILE = 24 * MIB


@pytest.fixture
def cgroups(tmp_path: Path) -> Iterator[Cgroups]:
    with node_cgroups(tmp_path) as cgroups:
        yield cgroups


@pytest.fixture
def host(tmp_path: Path) -> HostCapabilities:
    return probe_host(tmp_path)


@pytest.fixture
def pauser(cgroups: Cgroups, host: HostCapabilities) -> Pauser:
    return Pauser(cgroups.cgroups, host)


def wait_until_past(counter: Counter, value: int) -> None:
    deadline = time.monotonic() + 10
    while counter.value <= value:
        assert time.monotonic() < deadline, "the counter does not go on"
        time.sleep(0.005)


def stands_still(counter: Counter) -> bool:
    before = counter.value
    time.sleep(0.1)
    return counter.value == before


def big_file(path: Path) -> Path:
    """Not in the page cache, so that its pages are charged to whoever reads it."""
    with path.open("wb") as file:
        file.write(os.urandom(FILE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def freeze(
    pauser: Pauser, cgroup: SandboxCgroup, *, reclaim: bool = False, deadline_s: float = 10
) -> Frozen:
    return pauser.freeze(cgroup.sandbox_id, reclaim_memory=reclaim, deadline_s=deadline_s)


def thaw(pauser: Pauser, cgroup: SandboxCgroup) -> Thawed:
    return pauser.thaw(cgroup.sandbox_id, prefetch_memory=True, timeout_s=10)


def test_a_counter_stands_still_and_goes_on_however_often_it_is_said(
    cgroups: Cgroups, pauser: Pauser, tmp_path: Path
) -> None:
    cgroup = cgroups.sandbox()
    counter = Counter(cgroups, cgroup, tmp_path / "count")
    for _ in range(2):
        wait_until_past(counter, counter.value)
        frozen = freeze(pauser, cgroup)
        assert frozen.how == "none: not asked for"
        assert freeze(pauser, cgroup).resident_bytes > 0
        assert stands_still(counter)
        stood = counter.value
        thaw(pauser, cgroup)
        thaw(pauser, cgroup)
        wait_until_past(counter, stood)


def test_the_edge_alone_can_thaw_what_a_killed_snapshotter_froze(
    cgroups: Cgroups, pauser: Pauser, tmp_path: Path
) -> None:
    cgroup = cgroups.sandbox()
    counter = Counter(cgroups, cgroup, tmp_path / "count")
    freeze(pauser, cgroup)
    stood = counter.value
    (cgroup.v2_path / "cgroup.freeze").write_text("0")
    wait_until_past(counter, stood)


def test_a_sandbox_that_is_gone_is_not_found(cgroups: Cgroups, pauser: Pauser) -> None:
    cgroup = cgroups.sandbox()
    cgroup.remove()
    with pytest.raises(FileNotFoundError):
        freeze(pauser, cgroup)
    with pytest.raises(FileNotFoundError):
        thaw(pauser, cgroup)


def test_a_task_that_waits_in_the_kernel_is_named_and_the_sandbox_runs_on(
    cgroups: Cgroups, pauser: Pauser, tmp_path: Path
) -> None:
    cgroup = cgroups.sandbox()
    counter = Counter(cgroups, cgroup, tmp_path / "count")
    with silent_file_system(tmp_path / "silent") as mount_point:
        blocked = start_blocked(cgroups, cgroup, mount_point)
        wait_for_state(blocked.pid, "D")
        with pytest.raises(NotFrozenError, match=rf"process {blocked.pid} \(python\S*\) waits"):
            freeze(pauser, cgroup, deadline_s=0.5)
        assert not cgroup.is_frozen()
        wait_until_past(counter, counter.value)
        blocked.kill()
        blocked.wait(10)
        freeze(pauser, cgroup, deadline_s=5)
        assert stands_still(counter)


def wait_for_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_without_swap_only_file_pages_go_and_the_numbers_say_so(
    cgroups: Cgroups, pauser: Pauser, host: HostCapabilities, tmp_path: Path
) -> None:
    if host.swap.ok:
        pytest.skip("this host has swap")
    cgroup = cgroups.sandbox()
    holder = Holder(cgroups, cgroup, big_file(tmp_path / "file"), ANON)
    before = cgroup.stats().memory
    frozen = freeze(pauser, cgroup, reclaim=True)
    after = cgroup.stats().memory
    assert frozen.how == "file_only"
    assert frozen.swapped_bytes == 0
    assert before.file_bytes > FILE * 0.9
    assert frozen.file_bytes > FILE * 0.5
    assert after.anon_bytes > ANON * 0.95
    assert frozen.resident_bytes == pytest.approx(after.current_bytes, abs=MIB)
    assert frozen.file_bytes == pytest.approx(before.file_bytes - after.file_bytes, abs=MIB)
    thaw(pauser, cgroup)
    assert holder.is_whole()


def test_with_swap_memory_goes_out_comes_back_and_is_whole(
    cgroups: Cgroups, pauser: Pauser, tmp_path: Path
) -> None:
    """The swap is newer than what the pauser knows of its host, as it may be in production."""
    with own_swap():
        cgroup = cgroups.sandbox()
        holder = Holder(cgroups, cgroup, big_file(tmp_path / "file"), ANON)
        before = cgroup.stats().memory
        frozen = freeze(pauser, cgroup, reclaim=True)
        after = cgroup.stats().memory
        assert frozen.how in ("pageout", "memory_reclaim")
        assert frozen.anon_bytes > ANON * 0.8
        assert frozen.anon_bytes == pytest.approx(before.anon_bytes - after.anon_bytes, abs=MIB)
        assert frozen.swapped_bytes > ANON * 0.8
        assert frozen.reclaimed_bytes == frozen.anon_bytes + frozen.file_bytes
        thawed = thaw(pauser, cgroup)
        assert thawed.prefetched_bytes > ANON * 0.8
        assert holder.is_whole()
