"""The host end of a sandbox's veth has the last word, whatever the packet came from.

An intruder is a process inside the sandbox's network namespace but outside every policed cgroup:
the socket hooks do not see it, as they would not see a descriptor smuggled in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path

import pytest

from libhost.bpf.hook import LinkMechanism
from libhost.bpf.layout import Hook, Reason
from libhost.bpf.rule import Mode, Protocol, Rule
from libhost.bpf.table import PolicyTable

from . import frame, sandnet
from .sandnet import OTHER, OUTSIDE, OUTSIDE6, Process, Sandbox, World, ip


@pytest.fixture
def world(tmp_path: Path, node_name: str) -> Iterator[World]:
    sandnet.require()
    with sandnet.world(tmp_path, node_name) as made:
        made.outside.serve(kind="tcp", address=OUTSIDE, port=80)
        made.outside.serve(kind="udp", address=OUTSIDE, port=53)
        made.outside.serve(kind="udp", address=OUTSIDE, port=54)
        yield made


@pytest.fixture(params=LinkMechanism)
def table(world: World, request: pytest.FixtureRequest) -> PolicyTable:
    return world.open_table(mechanism=request.param)


@pytest.fixture
def sandbox(world: World, table: PolicyTable) -> Sandbox:
    """May reach the outside server by TCP on 80 and by UDP on 53."""
    made = world.sandbox()
    made.register(table)
    listed = ip_network(OUTSIDE)
    rules = [Rule(Protocol.TCP, listed, 80), Rule(Protocol.UDP, listed, 53)]
    table.load(made.sandbox_id, 1, rules)
    table.activate(made.sandbox_id, 1, Mode.RULES)
    return made


@pytest.fixture
def intruder(world: World, sandbox: Sandbox) -> Process:
    return world.intruder(sandbox)


def arrived(world: World, marker: str) -> list[str]:
    """What the outside server got before the marker, which is sent last and along the same way."""
    deadline = time.monotonic() + 5
    while marker not in (seen := world.outside.seen()):
        assert time.monotonic() < deadline, f"{marker} never arrived"
    return [text for text in seen if text != marker]


def sniffed(process: Process, source: str, last: bytes) -> list[bytes]:
    """Frames from this address, up to the last one, which was sent after all the others."""
    deadline = time.monotonic() + 5
    while True:
        frames = [bytes.fromhex(text) for text in process.seen() if len(text) > 60]
        if any(last in f for f in frames):
            return [f for f in frames if f[26:30] == ip_address(source).packed]
        assert time.monotonic() < deadline, f"{last!r} never arrived"


def test_a_smuggled_socket_reaches_listed_peers_only(world: World, intruder: Process) -> None:
    intruder.udp_send(address=OUTSIDE, port=54, text="unlisted")
    assert intruder.connect(address=OTHER, port=80, timeout_s=0.2) == "ETIMEDOUT"
    assert intruder.udp(address=OUTSIDE, port=53, text="last") == "LAST"
    assert arrived(world, "last") == []
    handle = intruder.connect(address=OUTSIDE, port=80)
    assert intruder.talk(handle=handle, text="listed") == "LISTED"


def test_packet_sockets_are_judged_like_any_other(
    world: World, sandbox: Sandbox, table: PolicyTable
) -> None:
    mac = world.router_mac(sandbox)

    def send(port: int, text: str, **options: object) -> None:
        source = str(options.pop("source", sandbox.address))
        packet = frame.ipv4(source, OUTSIDE, 17, frame.udp(9, port, text.encode()), **options)  # type: ignore[arg-type]
        assert sandbox.process.packet(interface="eth0", frame=frame.ethernet(mac, packet)) == "ok"

    send(54, "unlisted")
    send(53, "spoofed", source="10.77.0.99")
    send(53, "options", options=b"\x01\x01\x01\x01")
    listed = frame.ipv4(str(sandbox.address), OUTSIDE, 17, frame.udp(9, 53, b"tagged"))
    vlan = b"\x00\x05\x08\x00" + listed
    sandbox.process.packet(interface="eth0", frame=frame.ethernet(mac, vlan, 0x8100))
    send(53, "last")
    assert arrived(world, "last") == []
    counts = {d.reason: d.count for d in table.denials(sandbox.sandbox_id) if d.hook is Hook.LINK}
    assert counts == {Reason.UNLISTED: 1, Reason.SPOOFED: 1, Reason.MALFORMED: 2}


def test_fragments_carry_nothing_past_the_port_rules(
    world: World, sandbox: Sandbox, intruder: Process
) -> None:
    world.outside.sniff(interface="eth0")
    mac, own = world.router_mac(sandbox), str(sandbox.address)
    like_a_header = frame.udp(9, 53, b"secret")
    later = frame.ipv4(own, OUTSIDE, 17, like_a_header, fragment=2)
    intruder.packet(interface="eth0", frame=frame.ethernet(mac, later))
    short = frame.ipv4(own, OUTSIDE, 6, b"\x00\x09\x00\x50", more=True)
    intruder.packet(interface="eth0", frame=frame.ethernet(mac, short))
    assert intruder.udp(address=OUTSIDE, port=53, text="last") == "LAST"
    assert len(sniffed(world.outside, own, b"last")) == 1


def test_fragments_pass_where_every_port_is_open(sandbox: Sandbox, table: PolicyTable) -> None:
    big = "x" * 4000
    assert sandbox.process.udp(address=OUTSIDE, port=53, text=big, timeout_s=0.3) == "ETIMEDOUT"
    table.load(sandbox.sandbox_id, 2, [Rule(Protocol.UDP, ip_network(OUTSIDE))])
    table.activate(sandbox.sandbox_id, 2, Mode.RULES)
    assert sandbox.process.udp(address=OUTSIDE, port=53, text=big) == big.upper()


def test_answers_in_fragments_come_in(sandbox: Sandbox) -> None:
    assert sandbox.process.udp(address=OUTSIDE, port=53, text="big", timeout_s=5) == "BIG" * 2000


def test_other_protocols_do_not_leave(world: World, sandbox: Sandbox) -> None:
    world.outside.sniff(interface="eth0")
    mac, own = world.router_mac(sandbox), str(sandbox.address)
    for protocol, body in ((1, frame.icmp(8, 0, b"ping")), (47, b"tunnelled"), (132, bytes(12))):
        packet = frame.ipv4(own, OUTSIDE, protocol, body)
        sandbox.process.packet(interface="eth0", frame=frame.ethernet(mac, packet))
    assert sandbox.process.udp(address=OUTSIDE, port=53, text="last") == "LAST"
    assert len(sniffed(world.outside, own, b"last")) == 1


def test_arp_speaks_for_the_sandbox_only(world: World, sandbox: Sandbox) -> None:
    mac, told = world.router_mac(sandbox), "02:00:00:00:00:77"
    Path("/proc/sys/net/ipv4/neigh", sandbox.interface, "locktime").write_text("0")
    senders = ("10.77.0.99", str(sandbox.address))
    for sender in senders:
        ip("neigh", "replace", sender, "lladdr", told, "dev", sandbox.interface, "nud", "stale")
    deadline = time.monotonic() + 5
    while world.neighbours(sandbox)[senders[1]] == told and time.monotonic() < deadline:
        for sender in senders:
            reply = frame.arp_reply("02:00:00:00:00:01", sender, "169.254.77.1")
            sandbox.process.packet(interface="eth0", frame=frame.ethernet(mac, reply, 0x0806))
    assert world.neighbours(sandbox)[senders[1]] == "02:00:00:00:00:01"
    assert world.neighbours(sandbox)[senders[0]] == told


def test_nobody_opens_a_connection_into_a_sandbox(
    world: World, sandbox: Sandbox, table: PolicyTable
) -> None:
    table.load(sandbox.sandbox_id, 2, [Rule(Protocol.TCP, ip_network(OUTSIDE), 999)])
    table.activate(sandbox.sandbox_id, 2, Mode.RULES)
    sandbox.process.serve(kind="tcp", address="0.0.0.0", port=8000)
    inside = str(sandbox.address)
    for options in ({}, {"source_port": 999, "source": OUTSIDE}):
        answer = world.outside.connect(address=inside, port=8000, timeout_s=0.2, **options)
        assert answer == "ETIMEDOUT", options
    assert world.host.connect(address=inside, port=8000, timeout_s=0.2) == "ETIMEDOUT"
    assert table.counters(sandbox.sandbox_id).turned_away >= 3
    assert table.denials(sandbox.sandbox_id) == [], "the audit is about the sandbox"


def test_only_answers_of_listed_peers_come_in(world: World, sandbox: Sandbox) -> None:
    sandbox.process.sniff(interface="eth0")
    inside = str(sandbox.address)
    world.outside.udp_send(address=inside, port=9, text="unasked", source_port=7777)
    error = frame.icmp(3, 3, frame.ipv4(inside, OTHER, 17, frame.udp(9, 53, b"")))
    forged = frame.ipv4(OUTSIDE, inside, 1, error)
    mac = world.outside_gateway_mac()
    world.outside.packet(interface="eth0", frame=frame.ethernet(mac, forged))
    assert sandbox.process.udp(address=OUTSIDE, port=53, text="last") == "LAST"
    assert len(sniffed(sandbox.process, OUTSIDE, b"LAST")) == 1


def test_only_what_is_for_the_sandbox_and_not_in_its_name_comes_in(
    world: World, sandbox: Sandbox, table: PolicyTable
) -> None:
    table.load(sandbox.sandbox_id, 2, [Rule(Protocol.UDP, ip_network("0.0.0.0/0"))])
    table.activate(sandbox.sandbox_id, 2, Mode.RULES)
    ip("route", "add", "10.77.0.200/32", "dev", sandbox.interface)
    sandbox.process.sniff(interface="eth0")
    inside, mac = str(sandbox.address), world.outside_gateway_mac()
    for source, target in ((OUTSIDE, "10.77.0.200"), (inside, inside)):
        packet = frame.ipv4(source, target, 17, frame.udp(53, 9, b"stray"))
        world.outside.packet(interface="eth0", frame=frame.ethernet(mac, packet))
    assert sandbox.process.udp(address=OUTSIDE, port=53, text="last") == "LAST"
    assert b"stray" not in b"".join(sniffed(sandbox.process, OUTSIDE, b"LAST"))
    assert not any(b"stray" in bytes.fromhex(f) for f in sandbox.process.seen())


def test_errors_about_its_own_packets_come_in(world: World, sandbox: Sandbox) -> None:
    """Path MTU discovery: without the router's ICMP a long transfer would hang."""
    ip("link", "set", "dsout", "mtu", "1200")
    handle = sandbox.process.connect(address=OUTSIDE, port=80)
    assert sandbox.process.talk(handle=handle, text="y" * 3000, timeout_s=5).startswith("Y")
    assert "mtu 1200" in sandbox.process.run(argv=["ip", "route", "get", OUTSIDE])


def test_removed_sandbox_is_cut_off_at_once(
    world: World, sandbox: Sandbox, intruder: Process, table: PolicyTable
) -> None:
    assert intruder.udp(address=OUTSIDE, port=53, text="first") == "FIRST"
    assert table.remove(sandbox.sandbox_id)
    assert intruder.udp(address=OUTSIDE, port=53, text="second", timeout_s=0.2) == "ETIMEDOUT"
    assert world.outside.seen() == ["first"]


def test_ipv6_link_is_judged_by_the_same_rules(world: World, table: PolicyTable) -> None:
    world.outside.serve(kind="tcp", address=OUTSIDE6, port=80)
    sandbox = world.sandbox()
    sandbox.address = IPv6Address("fd77::2")
    sandbox.register(table)
    ip("-6", "address", "add", "fd77::1/64", "dev", sandbox.interface, "nodad")
    for line in ("address add fd77::2/64 dev eth0 nodad", "route add default via fd77::1"):
        assert sandbox.process.run(argv=["ip", "-6", *line.split()]) == ""
    table.load(sandbox.sandbox_id, 1, [Rule(Protocol.TCP, ip_network("fd88::/64"), 80)])
    table.activate(sandbox.sandbox_id, 1, Mode.RULES)
    handle = sandbox.process.connect(address=OUTSIDE6, port=80, timeout_s=3)
    assert sandbox.process.talk(handle=handle, text="six") == "SIX"
    assert sandbox.process.connect(address=OUTSIDE6, port=81) == "EPERM"
    intruder = world.intruder(sandbox)
    assert intruder.connect(address=OUTSIDE6, port=81, timeout_s=0.2) == "ETIMEDOUT"
    assert intruder.connect(address=OUTSIDE, port=80, timeout_s=0.2) == "ETIMEDOUT"
