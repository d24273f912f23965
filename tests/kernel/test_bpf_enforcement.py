"""Policies as an edge asks for them, in force in the kernel or refused with a reason."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec.errors import Conflict, DSecError, InvalidArgument, NotFound, Unsupported
from libdsec.wire.policy import ApplyPolicy
from libdsec.wire.sandbox import NetworkAllow, NetworkNone, NetworkSpec, PolicySpec
from libhost.bpf.table import PolicyTable
from services.policy.aliases import AliasFile
from services.policy.enforcement import LIST_MAY_BE_OLD_S, Enforcement

from . import sandnet
from .sandnet import OTHER, OUTSIDE, Sandbox, World

ALIASES = f"""
[services.mirror]
rules = ["tcp:{OUTSIDE}:80"]
env = {{ MIRROR = "http://mirror:80" }}
hosts = {{ mirror = "{OUTSIDE}" }}
"""


@pytest.fixture
def world(tmp_path: Path, node_name: str) -> Iterator[World]:
    sandnet.require()
    with sandnet.world(tmp_path, node_name) as made:
        for address in (OUTSIDE, OTHER):
            made.outside.serve(kind="tcp", address=address, port=80)
        yield made


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def table(world: World) -> PolicyTable:
    return world.open_table()


@pytest.fixture
def enforcement(world: World, table: PolicyTable, tmp_path: Path, now: list[float]) -> Enforcement:
    aliases = tmp_path / "aliases.toml"
    aliases.write_text(ALIASES)
    return Enforcement(
        world.paths.node,
        table,
        AliasFile(aliases),
        node_addresses=frozenset,
        monotonic=lambda: now[0],
    )


def asking(sandbox: Sandbox, generation: int, network: NetworkSpec, *paths: str) -> ApplyPolicy:
    return ApplyPolicy(
        sandbox_id=sandbox.sandbox_id,
        generation=generation,
        policy=PolicySpec(network=network, protected_paths=paths),
        cgroup_id=sandbox.cgroup_id,
        ifindex=sandbox.ifindex or None,
        address=str(sandbox.address) if sandbox.address else None,
    )


def reachable(sandbox: Sandbox) -> set[str]:
    peers = (OUTSIDE, OTHER)
    return {p for p in peers if sandbox.process.connect(address=p, port=80) != "EPERM"}


MIRROR = NetworkAllow(services=("mirror",))
BOTH = NetworkAllow(services=("mirror",), rules=(f"tcp:{OTHER}:80",))


def test_a_service_alias_opens_its_rules_and_tells_what_to_add(
    world: World, enforcement: Enforcement
) -> None:
    sandbox = world.sandbox()
    applied = enforcement.apply(asking(sandbox, 1, MIRROR))
    assert applied.compiled.env == {"MIRROR": "http://mirror:80"}
    assert applied.compiled.hosts == {"mirror": OUTSIDE}
    assert not applied.replaced
    assert reachable(sandbox) == {OUTSIDE}


def test_changes_replace_everything_and_repeats_change_nothing(
    world: World, enforcement: Enforcement
) -> None:
    sandbox = world.sandbox()
    enforcement.apply(asking(sandbox, 1, BOTH))
    assert reachable(sandbox) == {OUTSIDE, OTHER}
    assert enforcement.apply(asking(sandbox, 2, MIRROR)).replaced
    assert not enforcement.apply(asking(sandbox, 2, MIRROR)).replaced
    assert reachable(sandbox) == {OUTSIDE}
    enforcement.apply(asking(sandbox, 3, NetworkNone()))
    assert reachable(sandbox) == set()
    enforcement.apply(asking(sandbox, 4, NetworkAllow()))
    assert reachable(sandbox) == set()


def test_late_and_contradicting_generations_are_refused(
    world: World, enforcement: Enforcement
) -> None:
    sandbox = world.sandbox()
    enforcement.apply(asking(sandbox, 5, MIRROR))
    with pytest.raises(Conflict, match="came late: 5 is in force"):
        enforcement.apply(asking(sandbox, 4, BOTH))
    with pytest.raises(Conflict, match="with other content"):
        enforcement.apply(asking(sandbox, 5, BOTH))
    assert reachable(sandbox) == {OUTSIDE}


def test_a_refused_change_leaves_what_was_in_force(world: World, enforcement: Enforcement) -> None:
    sandbox = world.sandbox()
    enforcement.apply(asking(sandbox, 1, MIRROR))
    for bad in (NetworkAllow(services=("nope",)), NetworkAllow(rules=("tcp:nowhere:80",))):
        with pytest.raises(DSecError):
            enforcement.apply(asking(sandbox, 2, bad))
    assert reachable(sandbox) == {OUTSIDE}


def test_protected_paths_are_refused_with_the_reason(
    world: World, enforcement: Enforcement
) -> None:
    sandbox = world.sandbox()
    with pytest.raises(Unsupported, match="cannot protect /tests/\\*\\* from the sandbox: "):
        enforcement.apply(asking(sandbox, 1, NetworkNone(), "/tests/**"))
    assert enforcement.count() == 0


def test_a_network_needs_a_link(world: World, enforcement: Enforcement) -> None:
    sandbox = world.sandbox(link=False)
    enforcement.apply(asking(sandbox, 1, NetworkNone()))
    with pytest.raises(Conflict, match="has no link"):
        enforcement.apply(asking(sandbox, 2, MIRROR))
    linked = world.sandbox()
    half = asking(linked, 1, MIRROR).model_copy(update={"address": None})
    with pytest.raises(InvalidArgument, match="both its ifindex and the sandbox's address"):
        enforcement.apply(half)
    gone = asking(linked, 1, MIRROR).model_copy(update={"ifindex": 99999})
    with pytest.raises(InvalidArgument, match="not on this host"):
        enforcement.apply(gone)
    assert reachable(linked) == set(), "what was begun is sealed"


def test_another_nodes_sandbox_is_refused(world: World, enforcement: Enforcement) -> None:
    sandbox = world.sandbox(link=False)
    foreign = asking(sandbox, 1, NetworkNone()).model_copy(
        update={"sandbox_id": "elsewhere_abcdef_abcdefghijkm"}
    )
    with pytest.raises(InvalidArgument, match="does not belong to node"):
        enforcement.apply(foreign)


def test_audit_says_what_when_who_and_why(world: World, enforcement: Enforcement) -> None:
    sandbox = world.sandbox()
    enforcement.apply(asking(sandbox, 1, MIRROR))
    sandbox.process.connect(address=OTHER, port=443)
    denials, dropped = enforcement.audit(sandbox.sandbox_id, wall_s=2e9, boottime_s=0)
    (denial,) = denials
    assert (denial.kind, denial.target) == ("network", f"tcp {OTHER}:443")
    assert denial.process.endswith(f"[{sandbox.process.pid}]")
    assert (denial.rule, denial.count, dropped) == ("connect: unlisted", 1, 0)
    assert denial.at > 2e9
    with pytest.raises(NotFound):
        enforcement.audit(f"{world.paths.node}_abcdef_abcdefghijkm", wall_s=0, boottime_s=0)


def test_strays_are_told_by_name(world: World, enforcement: Enforcement) -> None:
    stray = world.sandbox(link=False)
    assert stray.process.socket(family=socket.AF_INET, kind=socket.SOCK_DGRAM) == "EPERM"
    (told,) = enforcement.strays()
    assert told.endswith("udp x1 (socket: unknown)")
    assert f"[{stray.process.pid}]" in told
    assert enforcement.stray_denied() == 1


def test_sweep_spares_what_is_younger_than_the_list(
    world: World, enforcement: Enforcement, now: list[float]
) -> None:
    old, young = world.sandbox(link=False), world.sandbox(link=False)
    enforcement.apply(asking(old, 1, NetworkNone()))
    now[0] += LIST_MAY_BE_OLD_S + 1
    enforcement.apply(asking(young, 1, NetworkNone()))
    lost = f"{world.paths.node}_abcdef_abcdefghijkm"
    assert enforcement.sweep([lost]) == ([old.sandbox_id], [lost])
    assert enforcement.count() == 1
    assert not enforcement.remove(old.sandbox_id)
    assert enforcement.remove(young.sandbox_id)
