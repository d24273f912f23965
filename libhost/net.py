"""A sandbox's way to the network: a veth pair, one address, one gateway, nothing else.

The sandbox has ``eth0`` with a /32 and a default route to a link-local gateway that the node
holds on a device of its own; both ends know the other's MAC by a permanent neighbour entry, so no
ARP is needed or answered. No IPv6 on the pair. Host-wide settings are never changed: whether the
host forwards beyond itself is the operator's decision.

Links are prepared ahead, down on the host side. The order for the caller is
``take`` -> attach the policy to ``link.ifindex`` -> ``open_gate`` -> start the process.
A network namespace is held by descriptor only: when its last process and descriptor are gone the
kernel removes it with both ends of the pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from libhost.paths import NodePaths, SandboxPaths

GATEWAY = IPv4Address("169.254.77.1")


@dataclass(frozen=True)
class Link:
    """take -> open_gate -> (container started) close_namespace -> remove."""

    interface: str
    ifindex: int
    address: IPv4Address
    namespace_fd: int

    def close_namespace(self) -> None:
        """Give up the descriptor once a process lives in the namespace."""
        raise NotImplementedError


class NodeNetwork:
    """The links of one node; ``addresses`` is the node's own range, disjoint from any other's."""

    def __init__(
        self,
        paths: NodePaths,
        addresses: IPv4Network,
        *,
        gateway: IPv4Address = GATEWAY,
        pool_size: int = 8,
    ) -> None:
        raise NotImplementedError

    def ensure(self) -> None:
        """Create the gateway device, read which addresses live sandboxes hold; idempotent."""
        raise NotImplementedError

    def refill(self) -> int:
        """Prepare links up to the pool's size; returns how many it made."""
        raise NotImplementedError

    def take(self, sandbox: SandboxPaths) -> Link:
        """A link named for the sandbox, host end still down. OSError EADDRNOTAVAIL: range full."""
        raise NotImplementedError

    def open_gate(self, link: Link) -> None:
        """Bring the host end up and route the address to it. The policy must be attached."""
        raise NotImplementedError

    def find(self, sandbox: SandboxPaths) -> Link | None:
        """The link of a running sandbox (``namespace_fd`` is -1), for a successor."""
        raise NotImplementedError

    def remove(self, sandbox: SandboxPaths) -> None:
        """Delete the host end (the other goes with it); idempotent."""
        raise NotImplementedError

    def interfaces(self) -> dict[str, int]:
        """Slot -> ifindex of every sandbox interface with an address of this node."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop the prepared links."""
        raise NotImplementedError

    def remove_gateway(self) -> None:
        """Delete the gateway device, for ``dsec down``."""
        raise NotImplementedError
