"""What a rule is: a value, compared with others and encoded for the kernel elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

ANY_PORT = 0


class Protocol(IntEnum):
    """IANA numbers, as they stand in the packet."""

    TCP = 6
    UDP = 17


class Mode(IntEnum):
    """What a sandbox may reach beyond its own loopback: nothing, or what its rules say."""

    SEALED = 0
    RULES = 1


@dataclass(frozen=True, order=True)
class Rule:
    """Traffic with these peers. The longest prefix decides, an exact port before any port."""

    protocol: Protocol
    network: Network
    port: int = ANY_PORT
    allow: bool = True

    def __str__(self) -> str:
        address = str(self.network)
        if self.network.prefixlen == self.network.max_prefixlen:
            address = str(self.network.network_address)
        if self.network.version == 6:
            address = f"[{address}]"
        port = "*" if self.port == ANY_PORT else str(self.port)
        return f"{'' if self.allow else '!'}{self.protocol.name.lower()}:{address}:{port}"
