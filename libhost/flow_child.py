"""Run as a program inside a sandbox's network namespace by :mod:`libhost.flow`.

Standard library only, since it is started in isolated mode. Reads the rules as JSON from
descriptor 3, destroys the flows they do not allow, prints what it did. See sock_diag(7).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any, Final, NamedTuple

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
SOCK_DESTROY: Final = 21
NLM_F_REQUEST: Final = 1
NLM_F_ACK: Final = 4
NLM_F_DUMP: Final = 0x300
NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3

# Connected in some way; for UDP the kernel calls a connected socket established.
_STATES: Final = sum(1 << state for state in (1, 2, 4, 5, 8, 9, 11))

_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBxxI48s")
_SOCKET: Final = struct.Struct("=Bxxx48s")
_SOCKET_ID: Final = struct.Struct("=2s2s16s16s12x")
_ERROR: Final = struct.Struct("=i")

Address = IPv4Address | IPv6Address
RuleRow = tuple[int, str, int, bool]  # protocol, network, port (0: any), allow


class Flow(NamedTuple):
    family: int
    protocol: int
    raw_id: bytes
    own: Address
    peer: Address
    port: int


def is_allowed(flow: Flow, rules: Sequence[tuple[int, Any, int, bool]]) -> bool:
    """As the kernel's program decides: the longest prefix, an exact port before any port."""
    for port in (flow.port, 0):
        fitting = [
            (network.prefixlen, allow)
            for protocol, network, rule_port, allow in rules
            if protocol == flow.protocol and rule_port == port and flow.peer in network
        ]
        if fitting:
            return max(fitting)[1]
    return False


def is_internal(flow: Flow) -> bool:
    return flow.peer.is_loopback or flow.peer == flow.own or flow.peer.is_unspecified


def _address(family: int, raw: bytes) -> Address:
    if family == socket.AF_INET:
        return IPv4Address(raw[:4])
    address = IPv6Address(raw)
    return address.ipv4_mapped or address


def parse_flow(protocol: int, body: bytes) -> Flow:
    """From ``struct inet_diag_msg``."""
    family, raw_id = _SOCKET.unpack_from(body)
    _, port, own, peer = _SOCKET_ID.unpack(raw_id)
    return Flow(
        family,
        protocol,
        raw_id,
        _address(family, own),
        _address(family, peer),
        int.from_bytes(port, "big"),
    )


def _send(sock: socket.socket, kind: int, flags: int, flow: tuple[int, int, bytes]) -> None:
    family, protocol, raw_id = flow
    body = _REQUEST.pack(family, protocol, _STATES, raw_id)
    sock.send(_HEADER.pack(_HEADER.size + len(body), kind, flags | NLM_F_REQUEST, 1, 0) + body)


def _messages(sock: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Until the end of a dump, or one acknowledgement."""
    while True:
        data = sock.recv(1 << 16)
        while data:
            length, kind, *_ = _HEADER.unpack_from(data)
            yield kind, data[_HEADER.size : length]
            if kind in (NLMSG_DONE, NLMSG_ERROR):
                return
            data = data[(length + 3) & ~3 :]


def flows(sock: socket.socket) -> Iterator[Flow]:
    for family in (socket.AF_INET, socket.AF_INET6):
        for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
            _send(sock, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, (family, protocol, bytes(48)))
            for kind, body in _messages(sock):
                if kind == SOCK_DIAG_BY_FAMILY:
                    yield parse_flow(protocol, body)


def destroy(sock: socket.socket, flow: Flow) -> int:
    """The errno, 0 if it is gone; one that ended by itself meanwhile is gone, too."""
    _send(sock, SOCK_DESTROY, NLM_F_ACK, (flow.family, flow.protocol, flow.raw_id))
    ((_, body),) = _messages(sock)
    (result,) = _ERROR.unpack_from(body)
    return 0 if result in (0, -errno.ENOENT) else -result


def main() -> None:
    with os.fdopen(3, "rb") as source:
        rows: list[RuleRow] = json.load(source)
    rules = [(protocol, ip_network(net), port, allow) for protocol, net, port, allow in rows]
    counts = {"ended": 0, "refused": 0}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as sock:
        sock.settimeout(5)
        sock.connect((0, 0))
        doomed = [f for f in flows(sock) if not is_internal(f) and not is_allowed(f, rules)]
        for flow in doomed:
            counts["refused" if destroy(sock, flow) else "ended"] += 1
    os.write(1, json.dumps(counts).encode())


if __name__ == "__main__":
    main()
