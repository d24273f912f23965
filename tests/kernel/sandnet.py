"""A node's network in miniature: a router namespace, sandboxes on veths, a server beyond it.

The calling thread itself moves into the router namespace while the world exists, because a policy
is attached to interfaces of the caller's own namespace, as on a node. Nothing of it can reach the
machine's network.

    outside (10.88.0.10, .11) -- 10.88.0.1 router 169.254.77.1 -- eth0 (10.77.0.<n>) sandbox
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

import libhost.bpf
from libdsec.wire.ids import new_sandbox_id
from libhost import syscall
from libhost.bpf.libbpf import library
from libhost.bpf.pins import remove_pins
from libhost.bpf.rule import Address
from libhost.bpf.table import PolicyTable
from libhost.errors import UnsupportedError
from libhost.paths import NodePaths

OUTSIDE = "10.88.0.10"
OTHER = "10.88.0.11"
OUTSIDE6 = "fd88::10"
UNIFIED = Path("/sys/fs/cgroup/unified")
SOURCE = Path(libhost.bpf.__file__).parent
OBJECT = SOURCE.parents[1] / "build" / "policy.bpf.o"
_ACTOR = Path(__file__).with_name("actor.py")


def cgroup_root() -> Path:
    return UNIFIED if UNIFIED.is_dir() else Path("/sys/fs/cgroup")


def require() -> None:
    """Skip, with the reason, where no policy can be enforced; build the object if need be."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    done = subprocess.run(
        ["make", "-s", "-C", str(SOURCE)], capture_output=True, text=True, timeout=60
    )
    if not OBJECT.exists():
        pytest.skip(f"the BPF object does not build: {done.stderr[-200:]}")
    try:
        library()
    except UnsupportedError as err:
        pytest.skip(str(err))


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)
    return done.stdout


def _mac_of(interface: str) -> str:
    return str(json.loads(ip("-json", "link", "show", interface))[0]["address"])


class Process:
    """An actor: ``actor.connect(address=..., port=...)`` runs over there."""

    def __init__(self, *cgroups: Path) -> None:
        argv = [sys.executable, "-S", str(_ACTOR), *map(str, cgroups)]
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._answer() == "ready"

    @property
    def pid(self) -> int:
        return self._child.pid

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            self.send(name, **arguments)
            return self._answer()

        return call

    def send(self, name: str, **arguments: Any) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self._child.stdin.flush()

    def _answer(self, timeout_s: float = 30) -> Any:
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], timeout_s)
        assert ready, "the actor did not answer"
        return json.loads(self._child.stdout.readline())

    wait_answer = _answer

    def answered(self) -> bool:
        """Whether the answer to what was sent is there to be read."""
        assert self._child.stdout is not None
        return bool(select.select([self._child.stdout], [], [], 0)[0])

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


@dataclass
class Sandbox:
    sandbox_id: str
    cgroup: Path
    process: Process
    address: Address | None = None
    ifindex: int = 0
    interface: str = ""

    @property
    def cgroup_id(self) -> int:
        return self.cgroup.stat().st_ino

    def register(self, table: PolicyTable) -> None:
        table.register(self.sandbox_id, self.cgroup_id, ifindex=self.ifindex, address=self.address)


@dataclass
class World:
    paths: NodePaths
    cgroup: Path
    outside: Process
    host: Process
    stack: ExitStack
    count: int = field(default=0)

    @property
    def thread_id(self) -> int:
        """Of the thread that is in the router namespace."""
        return threading.get_native_id()

    def open_table(self, **options: Any) -> PolicyTable:
        options.setdefault("object_path", OBJECT)
        table = PolicyTable.open(self.paths, self.cgroup, **options)
        self.stack.callback(table.close)
        return table

    def sandbox(self, *, link: bool = True) -> Sandbox:
        """A process in a registered-nowhere cgroup, with or without a veth. No IPv6 address."""
        self.count += 1
        sandbox_id = new_sandbox_id(self.paths.node, "abcdef")
        cgroup = self.cgroup / "be" / sandbox_id
        cgroup.mkdir()
        self.stack.callback(cgroup.rmdir)
        process = Process(cgroup)
        self.stack.callback(process.close)
        if not link:
            return Sandbox(sandbox_id, cgroup, process)
        return self._linked(Sandbox(sandbox_id, cgroup, process))

    def intruder(self, sandbox: Sandbox) -> Process:
        """In the sandbox's network namespace, in no policed cgroup."""
        process = Process()
        self.stack.callback(process.close)
        assert process.enter(pid=sandbox.process.pid) is None
        return process

    def router_mac(self, sandbox: Sandbox) -> str:
        return _mac_of(sandbox.interface)

    def outside_gateway_mac(self) -> str:
        return _mac_of("dsout")

    def neighbours(self, sandbox: Sandbox) -> dict[str, str]:
        shown = ip("-json", "neigh", "show", "dev", sandbox.interface)
        return {entry["dst"]: entry.get("lladdr", "") for entry in json.loads(shown)}

    def _linked(self, sandbox: Sandbox) -> Sandbox:
        sandbox.address = IPv4Address("10.77.0.0") + self.count
        sandbox.interface = f"dst{self.count}"
        peer = ("type", "veth", "peer", "name", "eth0", "netns", str(sandbox.process.pid))
        ip("link", "add", sandbox.interface, *peer)
        ip("link", "set", sandbox.interface, "up")
        ip("address", "add", "169.254.77.1/32", "dev", sandbox.interface)
        ip("route", "add", f"{sandbox.address}/32", "dev", sandbox.interface)
        sandbox.ifindex = socket.if_nametoindex(sandbox.interface)
        for line in (
            f"address add {sandbox.address}/32 dev eth0",
            "link set eth0 up",
            "route add 169.254.77.1 dev eth0",
            "route add default via 169.254.77.1",
        ):
            assert sandbox.process.run(argv=["ip", *line.split()]) == "", line
        return sandbox


@contextmanager
def router_namespace() -> Iterator[None]:
    """The calling thread's network is a fresh one; what it starts meanwhile is born there."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        syscall.unshare(syscall.CLONE_NEWNET)
        try:
            ip("link", "set", "lo", "up")
            yield
        finally:
            syscall.setns(home, syscall.CLONE_NEWNET)
    finally:
        os.close(home)


def _join_outside(outside: Process) -> None:
    ip("link", "add", "dsout", "type", "veth", "peer", "name", "eth0", "netns", str(outside.pid))
    for line in (
        "address add 10.88.0.1/24 dev dsout",
        "-6 address add fd88::1/64 dev dsout nodad",
        "link set dsout up",
    ):
        ip(*line.split())
    for line in (
        "address add 10.88.0.10/24 dev eth0",
        "address add 10.88.0.11/24 dev eth0",
        "-6 address add fd88::10/64 dev eth0 nodad",
        "link set eth0 up",
        "route add default via 10.88.0.1",
        "-6 route add default via fd88::1",
    ):
        assert outside.run(argv=["ip", *line.split()]) == "", line


def remove_cgroups(top: Path) -> None:
    for path in sorted(top.rglob("*"), key=lambda p: -len(p.parts)):
        if path.is_dir():
            path.rmdir()
    top.rmdir()


def remove_everywhere(name: str) -> None:
    """A service under test makes its node's cgroups in every hierarchy."""
    for top in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()):
        if (top / name).is_dir():
            remove_cgroups(top / name)


@contextmanager
def world(tmp: Path, node: str = "") -> Iterator[World]:
    """A node of that name, or one at random; its cgroups, pins and interfaces go with it."""
    paths = NodePaths(node or f"t{token_hex(4)}", tmp / "state", tmp / "run")
    paths.run_dir.mkdir(parents=True)
    with ExitStack() as stack:
        cgroup = cgroup_root() / paths.cgroup_name
        (cgroup / "be").mkdir(parents=True)
        stack.callback(remove_everywhere, paths.cgroup_name)
        stack.callback(remove_pins, paths)
        stack.enter_context(router_namespace())
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")
        outside = Process()
        stack.callback(outside.close)
        _join_outside(outside)
        host = Process()
        stack.callback(host.close)
        assert host.enter(pid=os.getpid(), tid=threading.get_native_id()) is None
        yield World(paths, cgroup, outside, host, stack)
