"""The table outlives whoever fills it, and no step of a change leaves anything half in force."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import IPv4Address, ip_network
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute

from libhost.bpf import libbpf
from libhost.bpf.hook import CGROUP_PROGRAMS
from libhost.bpf.pins import pin_directory, remove_pins
from libhost.bpf.rule import Mode, Protocol, Rule
from libhost.bpf.table import PolicyTable
from libhost.errors import BusyError, UnsupportedError

from . import sandnet
from .sandnet import OTHER, OUTSIDE, Sandbox, World


@pytest.fixture
def world(tmp_path: Path, node_name: str) -> Iterator[World]:
    sandnet.require()
    with sandnet.world(tmp_path, node_name) as made:
        for port in (80, 81, 82):
            made.outside.serve(kind="tcp", address=OUTSIDE, port=port)
        yield made


def put_in_force(table: PolicyTable, sandbox: Sandbox, generation: int, *ports: int) -> None:
    rules = [Rule(Protocol.TCP, ip_network(OUTSIDE), port) for port in ports]
    table.load(sandbox.sandbox_id, generation, rules)
    table.activate(sandbox.sandbox_id, generation, Mode.RULES)


def reachable(sandbox: Sandbox) -> set[int]:
    ports = (80, 81, 82)
    return {p for p in ports if sandbox.process.connect(address=OUTSIDE, port=p) != "EPERM"}


_OWNER = """
import sys
from ipaddress import ip_address, ip_network
from pathlib import Path
from libhost.bpf.rule import Mode, Protocol, Rule
from libhost.bpf.table import PolicyTable
from libhost.paths import NodePaths
node, top, cgroup, built, sandbox, cgroup_id, ifindex, address, peer = sys.argv[1:]
paths = NodePaths(node, Path(top, "state"), Path(top, "run"))
table = PolicyTable.open(paths, Path(cgroup), object_path=Path(built))
table.register(sandbox, int(cgroup_id), ifindex=int(ifindex), address=ip_address(address))
table.load(sandbox, 7, [Rule(Protocol.TCP, ip_network(peer), 80)])
table.activate(sandbox, 7, Mode.RULES)
print("in force", flush=True)
sys.stdin.read()
"""


def test_rules_stay_when_their_owner_is_killed_and_a_successor_adopts_them(world: World) -> None:
    sandbox = world.sandbox()
    words = (
        world.paths.node, world.paths.run_dir.parent, world.cgroup, sandnet.OBJECT,
        sandbox.sandbox_id, sandbox.cgroup_id, sandbox.ifindex, sandbox.address, OUTSIDE,
    )  # fmt: skip
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, *map(str, words)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"in force\n"
    with pytest.raises(BusyError, match="one policy service per node"):
        world.open_table()
    owner.kill()
    owner.communicate()

    assert reachable(sandbox) == {80}
    intruder = world.intruder(sandbox)
    assert intruder.connect(address=OUTSIDE, port=81, timeout_s=0.2) == "ETIMEDOUT"
    table = world.open_table()
    assert reachable(sandbox) == {80}
    active = table.in_force(sandbox.sandbox_id)
    assert active is not None
    assert (active.generation, active.mode) == (7, Mode.RULES)
    rules = [Rule(Protocol.TCP, ip_network(OUTSIDE), 80)]
    assert table.holds(sandbox.sandbox_id, active, rules)
    assert not table.holds(sandbox.sandbox_id, active, [replace(rules[0], allow=False)])
    put_in_force(table, sandbox, 8, 81)
    assert reachable(sandbox) == {81}


class Killed(BaseException):
    """Stands for the process being gone between two of its writes to the kernel."""


@pytest.fixture
def killed_after(monkeypatch: pytest.MonkeyPatch) -> Any:
    left = [-1]

    def guard(name: str) -> None:
        real = getattr(libbpf, name)

        def write(*args: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return real(*args)

        monkeypatch.setattr(libbpf, name, write)

    for name in ("map_update", "map_update_batch", "map_delete", "prog_attach"):
        guard(name)

    def arm(writes: int) -> None:
        left[0] = writes

    return arm


def test_a_switch_killed_at_any_step_leaves_one_whole_generation(
    world: World, killed_after: Any
) -> None:
    sandbox = world.sandbox()
    outcomes = []
    for step in range(50):
        table = world.open_table()
        sandbox.register(table)
        put_in_force(table, sandbox, 2 * step + 1, 80, 81)
        killed_after(step)
        try:
            put_in_force(table, sandbox, 2 * step + 2, 80, 82)
            finished = True
        except Killed:
            finished = False
        killed_after(-1)
        table.close()
        outcomes.append(reachable(sandbox))
        assert outcomes[-1] in ({80, 81}, {80, 82}), f"killed after {step} writes"
        table = world.open_table()
        assert reachable(sandbox) == outcomes[-1], "adoption changes nothing"
        assert len(list(table._rules.items())) == 2
        table.close()
        if finished:
            break
    assert outcomes[0] == {80, 81}
    assert outcomes[-1] == {80, 82}
    assert len(outcomes) >= 4


def test_registration_and_removal_killed_at_any_step_can_be_finished(
    world: World, killed_after: Any
) -> None:
    sandbox = world.sandbox()
    for step in range(50):
        table = world.open_table()
        killed_after(step)
        try:
            sandbox.register(table)
            put_in_force(table, sandbox, 1, 80)
            table.remove(sandbox.sandbox_id)
            finished = True
        except Killed:
            finished = False
        killed_after(-1)
        table.close()
        assert reachable(sandbox) in ({80}, set())
        table = world.open_table()
        assert not finished or not table.sandboxes()
        table.sweep(())
        assert entries(table) == 0, f"killed after {step} writes"
        table.close()
        if finished:
            break
    assert step > 12


def entries(table: PolicyTable) -> int:
    """Of every map; the counters of what belongs to no sandbox are always there."""
    maps = (table._sandboxes, table._slots, table._cgroups, table._links, table._rules)
    return sum(len(list(m.items())) for m in maps) + len(list(table._counts.items())) - 1


def test_registration_is_idempotent_and_may_add_a_link_later(world: World) -> None:
    table = world.open_table()
    sandbox = world.sandbox()
    slot = table.register(sandbox.sandbox_id, sandbox.cgroup_id)
    put_in_force(table, sandbox, 1, 80)
    for _ in range(2):
        assert (
            table.register(
                sandbox.sandbox_id,
                sandbox.cgroup_id,
                ifindex=sandbox.ifindex,
                address=sandbox.address,
            )
            == slot
        )
    assert reachable(sandbox) == {80}
    assert len(libbpf.prog_query(sandbox.ifindex, 46, "tcx")) == 1
    assert world.intruder(sandbox).connect(address=OUTSIDE, port=81, timeout_s=0.2) == "ETIMEDOUT"


def test_another_sandboxs_cgroup_or_link_is_refused(world: World) -> None:
    table = world.open_table()
    one = world.sandbox()
    one.register(table)
    with pytest.raises(BusyError, match="cgroup"):
        table.register("other", one.cgroup_id)
    with pytest.raises(BusyError, match="interface"):
        table.register("other", one.cgroup_id + 1, ifindex=one.ifindex, address=one.address)
    assert set(table.sandboxes()) == {one.sandbox_id}


def test_a_slot_is_not_used_again_at_once(world: World) -> None:
    table = world.open_table()
    first = table.register("a", 1001)
    table.remove("a")
    assert table.register("b", 1002) > first
    table.close()
    table = world.open_table()
    assert table.register("c", 1003) > table.sandboxes()["b"].slot


def test_generation_in_force_cannot_be_rewritten(world: World) -> None:
    table = world.open_table()
    sandbox = world.sandbox(link=False)
    sandbox.register(table)
    put_in_force(table, sandbox, 3, 80)
    with pytest.raises(ValueError, match="in force"):
        table.load(sandbox.sandbox_id, 3, [])


def test_sweep_removes_exactly_the_strangers(world: World) -> None:
    table = world.open_table()
    one, two = world.sandbox(), world.sandbox()
    for sandbox in (one, two):
        sandbox.register(table)
        put_in_force(table, sandbox, 1, 80)
    assert table.sweep({one.sandbox_id, "never-seen"}) == [two.sandbox_id]
    assert reachable(one) == {80}
    assert reachable(two) == set()


def test_programs_are_replaced_under_load_without_a_gap(world: World) -> None:
    sandbox = world.sandbox()
    table = world.open_table()
    sandbox.register(table)
    put_in_force(table, sandbox, 1, 80)
    stubborn = world.sandbox()
    stubborn.register(table)
    before = libbpf.prog_query(sandbox.ifindex, 46, "tcx")
    sandbox.process.send("hammer", address=OUTSIDE, port=80, count=2000)
    stubborn.process.send("hammer", address=OUTSIDE, port=80, count=20_000)
    for _ in range(3):
        table.close()
        table = world.open_table()
    assert sandbox.process.wait_answer() == {"X": 2000}
    assert stubborn.process.wait_answer() == {"EPERM": 20_000}
    after = libbpf.prog_query(sandbox.ifindex, 46, "tcx")
    assert len(after) == 1
    assert before != after


@pytest.mark.parametrize("restarted", [True, False])
def test_pins_of_a_cgroup_that_was_made_anew_are_not_trusted(world: World, restarted: bool) -> None:
    table = world.open_table()
    sandnet.remove_cgroups(world.cgroup)
    (world.cgroup / "be").mkdir(parents=True)
    if restarted:
        table.close()
        table = world.open_table()
    sandbox = world.sandbox()
    sandbox.register(table)
    assert reachable(sandbox) == set()
    put_in_force(table, sandbox, 1, 80)
    assert reachable(sandbox) == {80}


def test_removing_the_pins_leaves_nothing(world: World) -> None:
    table = world.open_table()
    directory = pin_directory(world.paths)
    assert {p.name for p in directory.iterdir()} >= {f"link_{n}" for n in CGROUP_PROGRAMS}
    table.close()
    assert remove_pins(world.paths) == len(CGROUP_PROGRAMS) + 7
    assert not directory.exists()
    assert str(world.paths.run_dir) not in Path("/proc/self/mountinfo").read_text()
    assert remove_pins(world.paths) == 0
    sandbox = world.sandbox()
    assert sandbox.process.connect(address=OTHER, port=80, timeout_s=0.2) != "EPERM"


def test_missing_object_says_how_to_build_it(world: World, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="make -C libhost/bpf"):
        world.open_table(object_path=tmp_path / "policy.bpf.o")


def test_object_that_is_none_is_named(world: World, tmp_path: Path) -> None:
    path = tmp_path / "policy.bpf.o"
    path.write_bytes(b"not an object")
    with pytest.raises(OSError, match=r"policy\.bpf\.o"):
        world.open_table(object_path=path)
    assert world.open_table().sandboxes() == {}, "nothing is held after a failure"


def test_unknown_interface_is_named(world: World) -> None:
    table = world.open_table()
    with pytest.raises(OSError, match="interface 999"):
        table.register("a", 1001, ifindex=999, address=IPv4Address("10.77.0.9"))


def test_adoption_passes_over_links_that_vanish_meanwhile(world: World) -> None:
    """Interfaces that come and go while the table is opened are nobody's failure."""
    table = world.open_table()
    registered = [f"{world.paths.node}_gone{n}" for n in range(10)]
    for n, sandbox_id in enumerate(registered):
        with _pair() as ifindex:
            table.register(sandbox_id, 1_000_000 + n, ifindex=ifindex)
    table.close()
    stop = threading.Event()
    churn = threading.Thread(target=_come_and_go, args=(stop,))
    churn.start()
    try:
        for _ in range(20):
            adopted = world.open_table()
            assert set(registered) <= set(adopted.sandboxes())
            adopted.close()
    finally:
        stop.set()
        churn.join()
    world.open_table().sweep([])


@contextmanager
def _pair() -> Iterator[int]:
    """An interface for as long as the block lasts."""
    name = f"dst{secrets.token_hex(3)}"
    with IPRoute() as ip:
        ip.link("add", ifname=f"{name}a", kind="veth", peer={"ifname": f"{name}b"})
        index = int(ip.link_lookup(ifname=f"{name}a")[0])
        try:
            yield index
        finally:
            ip.link("del", index=index)


def _come_and_go(stop: threading.Event) -> None:
    while not stop.is_set():
        with _pair():
            pass
