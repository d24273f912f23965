"""What a stack consists of, decided once at the first `up` and kept: nodes, ports, addresses.

Names and addresses of nodes are the host's, not the home's: cgroups, interfaces and pins are named
by the node. So that stacks of different homes can run side by side, only the default home's nodes
have plain names; others' carry a token of their home. Addresses come in parts, one for a stack,
held while it runs; a new stack takes one that no other holds.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import random
import socket
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network

from libdsec.errors import Conflict, InvalidArgument, NoCapacity

from .files import write_private
from .layout import StackPaths
from .settings import DEFAULT_HOME

MAX_NODES = 16
# The range for addresses behind somebody's gateway: 1024 nodes of 4094 addresses.
_ADDRESSES = IPv4Network("100.64.0.0/10")
_NODE_PREFIX = 20
_HOMES = 2 ** (_NODE_PREFIX - _ADDRESSES.prefixlen) // MAX_NODES


@dataclass(frozen=True)
class NodeDescription:
    name: str
    addresses: str  # of its sandboxes: a network that is this node's alone
    nats_port: int
    nats_http_port: int
    edge_port: int
    policy_port: int
    snapshotter_port: int


@dataclass(frozen=True)
class StackDescription:
    hub_port: int
    hub_http_port: int
    leaf_port: int
    scheduler_ports: tuple[int, ...]
    burst_port: int
    nodes: tuple[NodeDescription, ...]


def load_or_make(paths: StackPaths, *, nodes: int, schedulers: int) -> StackDescription:
    """The kept description, or a new one on free loopback ports.

    Raises:
        Conflict: the stack was made with another number of nodes or schedulers.
        InvalidArgument: what is kept is not a description.
    """
    if paths.description.exists():
        kept = _read(paths)
        if len(kept.nodes) != nodes or len(kept.scheduler_ports) != schedulers:
            raise Conflict(
                f"{paths.home} holds a stack of {len(kept.nodes)} nodes and "
                f"{len(kept.scheduler_ports)} schedulers",
                hint="ask for the same numbers, or use another --home",
            )
        return kept
    made = _make(paths, nodes, schedulers)
    write_private(paths.description, json.dumps(asdict(made), indent=1))
    return made


def load(paths: StackPaths) -> StackDescription | None:
    return _read(paths) if paths.description.exists() else None


def _make(paths: StackPaths, nodes: int, schedulers: int) -> StackDescription:
    token, part = _token_of(paths), _free_part(paths)
    networks = itertools.islice(
        _ADDRESSES.subnets(new_prefix=_NODE_PREFIX), part * MAX_NODES, part * MAX_NODES + nodes
    )
    ports = iter(_free_ports(4 + schedulers + 5 * nodes))
    return StackDescription(
        hub_port=next(ports),
        hub_http_port=next(ports),
        leaf_port=next(ports),
        burst_port=next(ports),
        scheduler_ports=tuple(next(ports) for _ in range(schedulers)),
        nodes=tuple(
            NodeDescription(f"n{i}{token}", str(network), *itertools.islice(ports, 5))
            for i, network in enumerate(networks, 1)
        ),
    )


def hold_addresses(description: StackDescription) -> socket.socket:
    """Keep what is returned for as long as the stack runs.

    Raises:
        Conflict: another stack on this host uses the same addresses for its sandboxes.
    """
    network = IPv4Network(description.nodes[0].addresses)
    offset = int(network.network_address) - int(_ADDRESSES.network_address)
    try:
        return _hold_part(offset // network.num_addresses // MAX_NODES)
    except OSError as err:
        raise Conflict(
            f"another stack on this host uses the addresses {network} and up",
            hint="take it down first, or remove stack.json and go up on other addresses",
        ) from err


def _hold_part(part: int) -> socket.socket:
    """An abstract name belongs to one socket of the network namespace and goes with it, like the
    routes that it stands for."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(f"\0dsec-addresses-{part}")
    except OSError:
        held.close()
        raise
    return held


def _free_part(paths: StackPaths) -> int:
    """The default home's is the first; for others, one that no running stack holds."""
    if paths.home == DEFAULT_HOME:
        return 0
    for part in random.sample(range(1, _HOMES), _HOMES - 1):
        with contextlib.suppress(OSError), _hold_part(part):
            return part
    raise NoCapacity(
        f"{_HOMES} stacks run on this host: no addresses are left for the sandboxes of another",
        hint="take one down",
    )


def _token_of(paths: StackPaths) -> str:
    """What tells the nodes of this home from another's."""
    if paths.home == DEFAULT_HOME:
        return ""
    digest = hashlib.blake2b(str(paths.home).encode()).digest()
    return f"-{base64.b32encode(digest)[:6].decode().lower()}"


def _read(paths: StackPaths) -> StackDescription:
    try:
        data = json.loads(paths.description.read_text())
        data["nodes"] = tuple(NodeDescription(**node) for node in data["nodes"])
        data["scheduler_ports"] = tuple(data["scheduler_ports"])
        return StackDescription(**data)
    except (ValueError, KeyError, TypeError) as err:
        raise InvalidArgument(
            f"{paths.description} does not describe a stack: {err}",
            hint="take the stack down with the version that made it, then remove the file",
        ) from err


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, below the range the kernel takes source ports from."""
    held: list[socket.socket] = []
    candidates = iter(random.sample(range(20_000, 32_000), 12_000))
    while len(held) < count:
        with contextlib.suppress(OSError):
            held.append(socket.create_server(("127.0.0.1", next(candidates))))
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports
