"""Ethernet frames by hand, for what no ordinary socket would send."""

from __future__ import annotations

import struct
from ipaddress import ip_address

BROADCAST = "ff:ff:ff:ff:ff:ff"


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ethernet(to: str, payload: bytes, kind: int = 0x0800) -> str:
    return (_mac(to) + _mac("02:00:00:00:00:01") + struct.pack("!H", kind) + payload).hex()


def ipv4(
    source: str,
    target: str,
    protocol: int,
    body: bytes,
    *,
    fragment: int = 0,
    more: bool = False,
    options: bytes = b"",
) -> bytes:
    """``fragment`` is the offset in units of 8 bytes."""
    length = 20 + len(options)
    first = 0x40 | length // 4
    flags = fragment | (0x2000 if more else 0)
    words = (first, 0, length + len(body), 7, flags, 64, protocol, 0)
    ends = ip_address(source).packed + ip_address(target).packed
    head = struct.pack("!BBHHHBBH", *words) + ends + options
    return head[:10] + struct.pack("!H", _checksum(head)) + head[12:] + body


def udp(sport: int, dport: int, data: bytes) -> bytes:
    """Without a checksum, which IPv4 allows."""
    return struct.pack("!HHHH", sport, dport, 8 + len(data), 0) + data


def icmp(kind: int, code: int, body: bytes) -> bytes:
    head = struct.pack("!BBHI", kind, code, 0, 0) + body
    padded = head + b"\0" * (len(head) % 2)
    return head[:2] + struct.pack("!H", _checksum(padded)) + head[4:]


def arp_reply(sender_mac: str, sender: str, target: str) -> bytes:
    ends = _mac(sender_mac) + ip_address(sender).packed + bytes(6) + ip_address(target).packed
    return struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + ends
