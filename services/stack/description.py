"""What a stack consists of, decided once at the first `up` and kept: nodes and ports."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import socket
from dataclasses import asdict, dataclass

from libdsec.errors import Conflict

from .files import write_private
from .layout import StackPaths


@dataclass(frozen=True)
class NodeDescription:
    name: str
    index: int  # which of the host's address ranges and capacity shares is its own
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
    """
    if paths.description.exists():
        kept = _parse(paths.description.read_text())
        if len(kept.nodes) != nodes or len(kept.scheduler_ports) != schedulers:
            raise Conflict(
                f"{paths.home} holds a stack of {len(kept.nodes)} nodes and "
                f"{len(kept.scheduler_ports)} schedulers",
                hint="ask for the same numbers, or use another --home",
            )
        return kept
    made = _make(nodes, schedulers)
    write_private(paths.description, json.dumps(asdict(made), indent=1))
    return made


def load(paths: StackPaths) -> StackDescription | None:
    return _parse(paths.description.read_text()) if paths.description.exists() else None


def _make(nodes: int, schedulers: int) -> StackDescription:
    ports = iter(_free_ports(4 + schedulers + 5 * nodes))
    return StackDescription(
        hub_port=next(ports),
        hub_http_port=next(ports),
        leaf_port=next(ports),
        burst_port=next(ports),
        scheduler_ports=tuple(next(ports) for _ in range(schedulers)),
        nodes=tuple(
            NodeDescription(f"n{i + 1}", i, *itertools.islice(ports, 5)) for i in range(nodes)
        ),
    )


def _parse(text: str) -> StackDescription:
    data = json.loads(text)
    data["nodes"] = tuple(NodeDescription(**node) for node in data["nodes"])
    data["scheduler_ports"] = tuple(data["scheduler_ports"])
    return StackDescription(**data)


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
