"""Links of a node: what a sandbox can reach through one, in which order, and that none stays."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from libhost import netns
from libhost.net import GATEWAY, NodeNetwork
from libhost.paths import NodePaths

from .libhost_node import LibhostNode, libhost_node


@pytest.fixture
def node(node_name: str, tmp_path: Path) -> Iterator[LibhostNode]:
    with libhost_node(node_name, tmp_path) as node:
        yield node


@pytest.fixture
def network(node_name: str, tmp_path: Path) -> Iterator[NodeNetwork]:
    paths = NodePaths(node_name, tmp_path / "state", tmp_path / "run")
    network = NodeNetwork(paths, IPv4Network("100.97.0.0/29"), pool_size=2)
    network.ensure()
    try:
        yield network
    finally:
        network.close()
        network.remove_gateway()


@contextmanager
def greeter(address: str) -> Iterator[int]:
    """Sends each caller its own address; the port."""
    with socket.create_server((address, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    peer, (caller, _) = server.accept()
                except OSError:
                    return
                with peer:
                    peer.sendall(caller.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_sandbox_reaches_the_node_by_its_gateway_and_with_its_own_address(
    node: LibhostNode,
) -> None:
    box = node.start(network=True)
    assert box.link is not None
    with greeter(str(GATEWAY)) as port:
        assert box.sh(f"nc -w 2 {GATEWAY} {port}") == str(box.link.address)


def test_sandbox_without_a_link_has_only_loopback(node: LibhostNode) -> None:
    box = node.start()
    up = box.sh("ip -o link show up | awk '{print $2}'")
    assert up == "lo:\n"  # some kernels put tunnel devices into every namespace, all down
    assert "inet 127.0.0.1" in box.sh("ip addr show up")


def test_inside_is_one_address_one_route_and_no_ipv6(node: LibhostNode) -> None:
    box = node.start(network=True)
    assert box.link is not None
    assert box.sh("ip -4 -o addr show dev eth0 | awk '{print $4}'") == f"{box.link.address}/32\n"
    assert box.sh("ip -6 addr show dev eth0") == ""
    assert box.sh("ip -6 addr show dev lo") != ""
    assert box.sh("ip route").splitlines()[0].split()[:3] == ["default", "via", str(GATEWAY)]
    assert "PERMANENT" in box.sh("ip neigh")


def test_sandbox_cannot_change_its_network(node: LibhostNode) -> None:
    box = node.start(network=True)
    said = box.sh("ip addr add 100.98.0.99/32 dev eth0; ip route add 1.1.1.1 dev eth0; echo")
    assert said.count("Operation not permitted") == 2


def test_loopback_of_the_host_is_not_reachable(node: LibhostNode) -> None:
    box = node.start(network=True)
    with greeter("127.0.0.1") as port:
        assert "refused" in box.sh(f"nc -w 1 127.0.0.1 {port} 2>&1")


def test_gate_is_closed_until_it_is_opened(network: NodeNetwork, node_name: str) -> None:
    sandbox = network._paths.sandbox(f"{node_name}_aaaaaa_gate")
    link = network.take(sandbox)
    with greeter(str(GATEWAY)) as port:

        def connect() -> str:
            try:
                with socket.create_connection((str(GATEWAY), port), timeout=0.3) as peer:
                    return peer.recv(64).decode()
            except OSError:
                return "unreachable"

        assert netns.run_inside(link.namespace_fd, connect) == "unreachable"
        network.open_gate(link)
        assert netns.run_inside(link.namespace_fd, connect) == str(link.address)
    link.close_namespace()
    link.close_namespace()  # idempotent: the number may be somebody else's by now
    network.remove(sandbox)
    network.remove(sandbox)
    assert network.interfaces() == {}


def test_spoofed_source_is_dropped(network: NodeNetwork, node_name: str) -> None:
    sandbox = network._paths.sandbox(f"{node_name}_aaaaaa_spoof")
    link = network.take(sandbox)
    network.open_gate(link)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((str(GATEWAY), 0))
        server.settimeout(0.5)

        def send(source: str) -> None:
            with IPRoute() as ip, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                if source != str(link.address):
                    eth0 = ip.link_lookup(ifname="eth0")[0]
                    ip.addr("add", index=eth0, address=source, prefixlen=32)
                sender.bind((source, 0))
                sender.sendto(source.encode(), server.getsockname())

        netns.run_inside(link.namespace_fd, lambda: send(str(link.address)))
        assert server.recv(64).decode() == str(link.address)
        netns.run_inside(link.namespace_fd, lambda: send("100.97.99.1"))
        with pytest.raises(TimeoutError):
            server.recv(64)
    link.close_namespace()
    network.remove(sandbox)


def test_addresses_run_out_with_a_clear_error_and_come_back(
    network: NodeNetwork, node_name: str
) -> None:
    """A /29 has 8 addresses; the first and the last are not given out."""
    sandboxes = [network._paths.sandbox(f"{node_name}_aaaaaa_{n:02}") for n in range(7)]
    links = [network.take(sandbox) for sandbox in sandboxes[:6]]
    assert len({link.address for link in links}) == 6
    assert IPv4Address("100.97.0.0") not in {link.address for link in links}
    with pytest.raises(OSError, match="every address"):
        network.take(sandboxes[6])
    for link, sandbox in zip(links, sandboxes, strict=False):
        link.close_namespace()
        network.remove(sandbox)
    again = network.take(sandboxes[6])
    again.close_namespace()
    network.remove(sandboxes[6])


def test_a_route_that_somebody_else_has_is_an_os_error(
    network: NodeNetwork, node_name: str
) -> None:
    link = network.take(network._paths.sandbox(f"{node_name}_aaaaaa_aaaaaaaaaaaa"))
    with IPRoute() as ip:
        gateway = ip.link_lookup(ifname=network._paths.gateway_interface)[0]
        ip.route("add", dst=f"{link.address}/32", oif=gateway, scope=253)
    with pytest.raises(FileExistsError):
        network.open_gate(link)
    link.close_namespace()


def test_link_vanishes_with_its_last_user(network: NodeNetwork, node_name: str) -> None:
    """Proven by the leak check: nothing is removed here but the descriptor."""
    link = network.take(network._paths.sandbox(f"{node_name}_aaaaaa_last"))
    link.close_namespace()


def test_error_inside_a_namespace_comes_out_and_takes_it_along() -> None:
    with pytest.raises(ZeroDivisionError):
        netns.create_with(lambda: 1 / 0)
    before = Path("/proc/thread-self/ns/net").readlink()
    fd, inside = netns.create_with(lambda: Path("/proc/thread-self/ns/net").readlink())
    assert inside != before
    assert netns.run_inside(fd, lambda: Path("/proc/thread-self/ns/net").readlink()) == inside
    assert Path("/proc/thread-self/ns/net").readlink() == before
