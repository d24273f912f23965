"""The policy around a real container: in force before its first process, on the node's links."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from libhost.bpf.layout import Hook, Reason
from libhost.bpf.pins import remove_pins
from libhost.bpf.rule import Mode, Protocol, Rule
from libhost.bpf.table import PolicyTable
from libhost.net import GATEWAY

from . import sandnet
from .libhost_node import LibhostNode, libhost_node


@pytest.fixture
def node(node_name: str, tmp_path: Path) -> Iterator[LibhostNode]:
    sandnet.require()
    with libhost_node(node_name, tmp_path) as node:
        yield node


@pytest.fixture
def table(node: LibhostNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[PolicyTable]:
    """Every container of the node is registered before its first process, as an edge does it."""
    table = PolicyTable.open(node.paths, node.host.cgroups.v2_path, object_path=sandnet.OBJECT)
    launch = node.host.runtime.launch

    def policed(paths: Any, *, cgroup: Any, link: Any, **rest: Any) -> Any:
        table.register(
            paths.sandbox_id,
            cgroup.v2_path.stat().st_ino,
            ifindex=link.ifindex if link else 0,
            address=link.address if link else None,
        )
        return launch(paths, cgroup=cgroup, link=link, **rest)

    monkeypatch.setattr(node.host.runtime, "launch", policed)
    yield table
    table.close()
    assert remove_pins(node.paths) > 0


class _Mirror(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"package index")

    def log_message(self, *_: object) -> None:
        """The test's output is about the test."""


@contextmanager
def mirror() -> Iterator[int]:
    """A server on the host end of every link; its port."""
    with ThreadingHTTPServer((str(GATEWAY), 0), _Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def test_sealed_container_has_its_loopback_and_nothing_else(
    node: LibhostNode, table: PolicyTable
) -> None:
    box = node.start()
    served = box.sh("httpd -p 127.0.0.1:8000 -h /etc; wget -qO- http://127.0.0.1:8000/passwd")
    assert served.startswith("root:x:0:0")
    assert "not permitted" in box.sh(f"timeout 2 wget -qO- http://{GATEWAY}:80/ 2>&1")
    denials = table.denials(box.paths.sandbox_id)
    assert [(d.hook, d.reason, d.command) for d in denials] == [
        (Hook.CONNECT, Reason.UNLISTED, "wget")
    ], "starting a container meets no refusal of its own"
    assert table.stray_denials() == []


def test_container_reaches_the_listed_port_of_its_gateway(
    node: LibhostNode, table: PolicyTable
) -> None:
    box = node.start(network=True)
    with mirror() as listed, mirror() as other:
        rules = [Rule(Protocol.TCP, ip_network(GATEWAY), listed)]
        table.load(box.paths.sandbox_id, 1, rules)
        table.activate(box.paths.sandbox_id, 1, Mode.RULES)
        got = box.sh(f"timeout 5 wget -qO- http://{GATEWAY}:{listed}/ 2>&1")
        assert got == "package index"
        refused = box.sh(f"timeout 5 wget -qO- http://{GATEWAY}:{other}/ 2>&1")
        assert "not permitted" in refused
        table.load(box.paths.sandbox_id, 2, [])
        table.activate(box.paths.sandbox_id, 2, Mode.SEALED)
        assert "not permitted" in box.sh(f"timeout 5 wget -qO- http://{GATEWAY}:{listed}/ 2>&1")


def test_neighbours_cannot_reach_each_other(node: LibhostNode, table: PolicyTable) -> None:
    one, two = node.start(network=True), node.start(network=True)
    assert one.link is not None
    assert two.link is not None
    everything = [Rule(Protocol.TCP, ip_network("0.0.0.0/0"))]
    for box in (one, two):
        table.load(box.paths.sandbox_id, 1, everything)
        table.activate(box.paths.sandbox_id, 1, Mode.RULES)
    two.sh("httpd -p 8000 -h /etc")
    assert two.sh(f"timeout 2 wget -qO- http://{two.link.address}:8000/passwd").startswith("root:")
    assert "root:" not in one.sh(f"timeout 2 wget -qO- http://{two.link.address}:8000/passwd 2>&1")
