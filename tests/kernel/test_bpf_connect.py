"""What a process in a sandbox meets when it connects, sends or opens a socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from random import Random

import pytest

from libhost.bpf.layout import Hook, Reason
from libhost.bpf.rule import Address, Mode, Protocol, Rule
from libhost.bpf.table import PolicyTable
from libhost.flow_child import Flow, is_allowed

from . import sandnet
from .sandnet import OTHER, OUTSIDE, Sandbox, World


@pytest.fixture
def world(tmp_path: Path, node_name: str) -> Iterator[World]:
    sandnet.require()
    with sandnet.world(tmp_path, node_name) as made:
        made.outside.serve(kind="tcp", address=OUTSIDE, port=80)
        made.outside.serve(kind="udp", address=OUTSIDE, port=53)
        yield made


@pytest.fixture
def table(world: World) -> PolicyTable:
    return world.open_table()


def rules(*texts: str) -> frozenset[Rule]:
    found = set()
    for text in texts:
        protocol, rest = text.split(":", 1)
        address, port = rest.rsplit(":", 1)
        number = 0 if port == "*" else int(port)
        found.add(Rule(Protocol[protocol.upper()], ip_network(address), number))
    return frozenset(found)


def allow(table: PolicyTable, sandbox: Sandbox, generation: int, *texts: str) -> None:
    table.load(sandbox.sandbox_id, generation, rules(*texts))
    table.activate(sandbox.sandbox_id, generation, Mode.RULES)


def test_unregistered_cgroup_has_no_sockets_at_all(world: World, table: PolicyTable) -> None:
    sandbox = world.sandbox()
    assert sandbox.process.socket(family=socket.AF_INET, kind=socket.SOCK_STREAM) == "EPERM"
    assert sandbox.process.socket(family=socket.AF_INET6, kind=socket.SOCK_DGRAM) == "EPERM"
    (denial, *_) = table.stray_denials()
    assert (denial.hook, denial.reason) == (Hook.SOCKET, Reason.UNKNOWN)


def test_sealed_sandbox_keeps_its_own_loopback(world: World, table: PolicyTable) -> None:
    sandbox = world.sandbox()
    sandbox.register(table)
    actor = sandbox.process
    actor.serve(kind="tcp", address="0.0.0.0", port=8000)
    actor.serve(kind="udp", address="127.0.0.1", port=8001)
    for own in ("127.0.0.1", "0.0.0.0", str(sandbox.address)):
        handle = actor.connect(address=own, port=8000)
        assert actor.talk(handle=handle, text="own") == "OWN"
    assert actor.udp(address="127.0.0.1", port=8001, text="own") == "OWN"
    assert actor.connect(address=OUTSIDE, port=80) == "EPERM"
    assert actor.udp(address=OUTSIDE, port=53, text="q") == "EPERM"


def test_listed_peer_is_reached_and_no_other(world: World, table: PolicyTable) -> None:
    world.outside.serve(kind="tcp", address=OTHER, port=80)
    sandbox = world.sandbox()
    sandbox.register(table)
    allow(table, sandbox, 1, f"tcp:{OUTSIDE}:80", f"udp:{OUTSIDE}:53")
    actor = sandbox.process
    handle = actor.connect(address=OUTSIDE, port=80)
    assert actor.talk(handle=handle, text="x" * 5000).startswith("XXXX")
    assert actor.udp(address=OUTSIDE, port=53, text="q") == "Q"
    assert actor.connect(address=OUTSIDE, port=81) == "EPERM"
    assert actor.connect(address=OTHER, port=80) == "EPERM"
    assert actor.udp(address=OUTSIDE, port=80, text="q") == "EPERM", "the protocol counts"


def test_ipv4_mapped_address_meets_the_ipv4_rules(world: World, table: PolicyTable) -> None:
    sandbox = world.sandbox()
    sandbox.register(table)
    allow(table, sandbox, 1, f"tcp:{OUTSIDE}:80")
    actor = sandbox.process
    handle = actor.connect(address=f"::ffff:{OUTSIDE}", port=80)
    assert actor.talk(handle=handle, text="mapped") == "MAPPED"
    assert actor.connect(address=f"::ffff:{OTHER}", port=80) == "EPERM"


def test_ipv6_without_a_rule_is_denied(world: World, table: PolicyTable) -> None:
    sandbox = world.sandbox()
    sandbox.register(table)
    allow(table, sandbox, 1, "tcp:0.0.0.0/0:*", "udp:0.0.0.0/0:*")
    assert sandbox.process.connect(address=sandnet.OUTSIDE6, port=80) == "EPERM"
    assert sandbox.process.udp(address=sandnet.OUTSIDE6, port=53, text="q") == "EPERM"
    allow(table, sandbox, 2, "tcp:::/0:80")
    assert sandbox.process.connect(address=OUTSIDE, port=80) == "EPERM", "::/0 is IPv6 only"
    assert sandbox.process.connect(address=f"::ffff:{OUTSIDE}", port=80) == "EPERM"
    assert sandbox.process.connect(address=sandnet.OUTSIDE6, port=80) == "ENETUNREACH"


def test_longest_prefix_decides_and_a_port_comes_before_any_port(
    world: World, table: PolicyTable
) -> None:
    world.outside.serve(kind="tcp", address=OTHER, port=80)
    sandbox = world.sandbox()
    sandbox.register(table)
    everything = Rule(Protocol.TCP, ip_network("0.0.0.0/0"))
    but = Rule(Protocol.TCP, ip_network("10.88.0.0/24"), allow=False)
    one = Rule(Protocol.TCP, ip_network(OUTSIDE), 80)
    table.load(sandbox.sandbox_id, 1, [everything, but, one])
    table.activate(sandbox.sandbox_id, 1, Mode.RULES)
    assert isinstance(sandbox.process.connect(address=OUTSIDE, port=80), int)
    assert sandbox.process.connect(address=OTHER, port=80) == "EPERM"
    assert sandbox.process.connect(address="10.88.1.1", port=80, timeout_s=0.2) != "EPERM"


@pytest.mark.parametrize("seed", range(5))
def test_kernel_decides_as_the_plain_judgement_does(
    world: World, table: PolicyTable, seed: int
) -> None:
    """Nested prefixes of both families and verdicts, against peers in and beside them."""
    dice = Random(seed)

    def address() -> Address:
        if dice.random() < 0.3:
            return ip_address(f"fd00::{dice.randrange(4):x}:{dice.randrange(4):x}")
        return ip_address(f"10.{dice.randrange(2)}.{dice.randrange(4)}.{dice.randrange(4)}")

    def rule() -> Rule:
        at = address()
        prefix = dice.randrange(at.max_prefixlen + 1) if dice.random() < 0.3 else (
            at.max_prefixlen - dice.randrange(20)
        )  # fmt: skip
        network = ip_network((at, prefix), strict=False)
        return Rule(Protocol.UDP, network, dice.choice([0, 0, 53, 80]), dice.random() < 0.6)

    found = {(r.network, r.port): r for r in (rule() for _ in range(60))}
    sandbox = world.sandbox()
    sandbox.register(table)
    table.load(sandbox.sandbox_id, 1, found.values())
    table.activate(sandbox.sandbox_id, 1, Mode.RULES)
    rows = [(int(r.protocol), r.network, r.port, r.allow) for r in found.values()]
    peers = [(address(), dice.choice([53, 80, 81])) for _ in range(400)]
    expected = [not is_allowed(Flow(0, 17, b"", at, at, port), rows) for at, port in peers]
    answers = sandbox.process.refused(peers=[(str(peer), port) for peer, port in peers])
    assert answers == expected
    assert 20 < sum(expected) < 380, "the dice must show both sides"


def test_raw_and_unusual_sockets_are_refused(world: World, table: PolicyTable) -> None:
    sandbox = world.sandbox()
    sandbox.register(table)
    allow(table, sandbox, 1, "tcp:0.0.0.0/0:*", "udp:0.0.0.0/0:*")
    ping, mptcp, sctp, udplite = socket.IPPROTO_ICMP, 262, 132, 136
    for kind, protocol in (
        (socket.SOCK_RAW, socket.IPPROTO_RAW),
        (socket.SOCK_RAW, socket.IPPROTO_ICMP),
        (socket.SOCK_DGRAM, ping),
        (socket.SOCK_STREAM, mptcp),
        (socket.SOCK_STREAM, sctp),
        (socket.SOCK_DGRAM, udplite),
    ):
        answer = sandbox.process.socket(family=socket.AF_INET, kind=kind, protocol=protocol)
        assert answer in {"EPERM", "EPROTONOSUPPORT", "EACCES"}, (kind, protocol)
    assert sandbox.process.socket(family=socket.AF_UNIX, kind=socket.SOCK_STREAM) == "ok"
    raw = [d for d in table.denials(sandbox.sandbox_id) if d.reason is Reason.RAW_SOCKET]
    assert {d.protocol for d in raw} >= {socket.IPPROTO_RAW, ping, mptcp}


def test_child_cgroup_has_its_sandbox_policy(world: World, table: PolicyTable) -> None:
    sandbox = world.sandbox()
    sandbox.register(table)
    allow(table, sandbox, 1, f"tcp:{OUTSIDE}:80")
    leaf = sandbox.cgroup / "box" / "command"
    leaf.mkdir(parents=True)
    world.stack.callback(leaf.parent.rmdir)
    world.stack.callback(leaf.rmdir)
    world.stack.callback(sandbox.process.close)
    (leaf / "cgroup.procs").write_text(str(sandbox.process.pid))
    assert isinstance(sandbox.process.connect(address=OUTSIDE, port=80), int)
    assert sandbox.process.connect(address=OTHER, port=80) == "EPERM"


def test_sandboxes_do_not_share_rules(world: World, table: PolicyTable) -> None:
    one, two = world.sandbox(), world.sandbox()
    one.register(table)
    two.register(table)
    allow(table, one, 1, f"tcp:{OUTSIDE}:80")
    allow(table, two, 1, f"tcp:{OTHER}:80")
    assert isinstance(one.process.connect(address=OUTSIDE, port=80), int)
    assert two.process.connect(address=OUTSIDE, port=80) == "EPERM"
    assert one.process.connect(address=str(two.address), port=80) == "EPERM"


def test_denial_names_the_process_the_peer_and_how_often(world: World, table: PolicyTable) -> None:
    sandbox = world.sandbox()
    sandbox.register(table)
    for _ in range(3):
        assert sandbox.process.connect(address=OUTSIDE, port=443) == "EPERM"
    (denial,) = table.denials(sandbox.sandbox_id)
    assert (str(denial.address), denial.port, denial.protocol) == (OUTSIDE, 443, Protocol.TCP)
    assert (denial.count, denial.pid) == (3, sandbox.process.pid)
    assert denial.command
    assert table.counters(sandbox.sandbox_id).denied == 3


def test_audit_is_bounded_and_says_what_it_left_out(world: World, table: PolicyTable) -> None:
    sandbox = world.sandbox(link=False)
    sandbox.register(table)
    for port in range(1, 201):
        assert sandbox.process.connect(address=OUTSIDE, port=port) == "EPERM"
    counters = table.counters(sandbox.sandbox_id)
    assert (counters.denied, counters.recorded, counters.unrecorded) == (200, 128, 72)
    assert len(table.denials(sandbox.sandbox_id)) == 128


def test_generation_flips_under_load_without_one_failed_connect(
    world: World, table: PolicyTable
) -> None:
    sandbox = world.sandbox()
    sandbox.register(table)
    listed = [f"tcp:10.99.{i}.0/24:443" for i in range(50)]
    allow(table, sandbox, 1, f"tcp:{OUTSIDE}:80", *listed)
    sandbox.process.send("hammer", address=OUTSIDE, port=80, count=2000)
    flips = 0
    while not sandbox.process.answered():
        flips += 1
        allow(table, sandbox, flips + 1, f"tcp:{OUTSIDE}:80", *listed[flips % 50 :])
    assert sandbox.process.wait_answer() == {"X": 2000}
    assert flips > 20


def test_switch_to_deny_stops_an_open_flow_and_switch_back_lets_it_go_on(
    world: World, table: PolicyTable
) -> None:
    sandbox = world.sandbox()
    sandbox.register(table)
    allow(table, sandbox, 1, f"tcp:{OUTSIDE}:80")
    handle = sandbox.process.connect(address=OUTSIDE, port=80)
    table.load(sandbox.sandbox_id, 2, [])
    table.activate(sandbox.sandbox_id, 2, Mode.SEALED)
    assert sandbox.process.talk(handle=handle, text="a", timeout_s=0.2) == "ETIMEDOUT"
    assert world.outside.seen() == []
    allow(table, sandbox, 3, f"tcp:{OUTSIDE}:80")
    assert sandbox.process.read(handle=handle, timeout_s=5) == "A"


def test_socket_connected_before_a_switch_is_refused_after_it(
    world: World, table: PolicyTable
) -> None:
    sandbox = world.sandbox()
    sandbox.register(table)
    allow(table, sandbox, 1, f"udp:{OUTSIDE}:53")
    handle = sandbox.process.connect_udp(address=OUTSIDE, port=53)
    assert sandbox.process.talk(handle=handle, text="q") == "Q"
    allow(table, sandbox, 2)
    assert sandbox.process.talk(handle=handle, text="q") == "EPERM"
    (denial,) = table.denials(sandbox.sandbox_id)
    assert (denial.hook, denial.pid) == (Hook.EGRESS, 0)


def test_sockets_are_closed_to_outsiders_even_without_a_filter_on_the_link(
    world: World, table: PolicyTable
) -> None:
    sandbox = world.sandbox()
    table.register(sandbox.sandbox_id, sandbox.cgroup_id)
    allow(table, sandbox, 1, f"tcp:{OUTSIDE}:999")
    sandbox.process.serve(kind="tcp", address="0.0.0.0", port=8000)
    for origin in ({}, {"source": OUTSIDE, "source_port": 999}):
        answer = world.outside.connect(
            address=str(sandbox.address), port=8000, timeout_s=0.2, **origin
        )
        assert answer == "ETIMEDOUT"
    assert table.counters(sandbox.sandbox_id).turned_away >= 2


def test_socket_in_the_hosts_own_network_is_refused(world: World, table: PolicyTable) -> None:
    sandbox = world.sandbox(link=False)
    sandbox.register(table)
    assert sandbox.process.enter(pid=os.getppid()) is None
    assert sandbox.process.socket(family=socket.AF_INET, kind=socket.SOCK_STREAM) == "EPERM"
    (denial,) = table.denials(sandbox.sandbox_id)
    assert denial.reason is Reason.HOST_NETWORK
