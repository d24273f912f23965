"""How values of the policy look in the kernel's maps.

The same structures as in ``policy.h``, byte for byte; a test compares the two through the object's
own type information. Integers are in the host's order except ports and addresses, which are as on
the wire. IPv4 addresses are stored as ``::ffff:a.b.c.d``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from libhost.bpf.rule import Address, Mode, Rule

SANDBOX_ID_SIZE: Final = 64
UNKNOWN_SLOT: Final = 0
ALLOW: Final = b"\x01"
DENY: Final = b"\x00"

_MAPPED: Final = bytes(10) + b"\xff\xff"
_NO_ADDRESS: Final = bytes(16)
_KEY_BITS: Final = 96  # slot, generation, protocol, family, port: compared exactly
_RULE_KEY: Final = struct.Struct("=IIIBB2s16s")
_RULE_OWNER: Final = struct.Struct("=4xII")
_SLOT: Final = struct.Struct("=Q16s")
_SANDBOX: Final = struct.Struct("=QII16s")
_COUNTERS: Final = struct.Struct("=QQQQQ")
_DENIAL_KEY: Final = struct.Struct("=IHBB2s2x16s")
_DENIAL: Final = struct.Struct("=QQI16s4x")
_U32: Final = struct.Struct("=I")
_U64: Final = struct.Struct("=Q")

u32 = _U32.pack
u64 = _U64.pack


def as_u32(raw: bytes) -> int:
    (value,) = _U32.unpack(raw)
    return int(value)


class Hook(IntEnum):
    """Where something was refused."""

    SOCKET = 1
    CONNECT = 2
    SENDMSG = 3
    EGRESS = 4
    LINK = 5


class Reason(IntEnum):
    """Why it was refused; ``policy.h`` explains each."""

    UNLISTED = 1
    UNKNOWN = 2
    SPOOFED = 3
    MALFORMED = 4
    RAW_SOCKET = 5
    HOST_NETWORK = 6


def pack_address(address: Address | None) -> bytes:
    if address is None:
        return _NO_ADDRESS
    return address.packed if address.version == 6 else _MAPPED + address.packed


def unpack_address(raw: bytes) -> Address | None:
    if raw == _NO_ADDRESS:
        return None
    return IPv4Address(raw[12:]) if raw[:12] == _MAPPED else IPv6Address(raw)


def pack_rule(slot: int, generation: int, rule: Rule) -> bytes:
    prefix = rule.network.prefixlen + (96 if rule.network.version == 4 else 0)
    return _RULE_KEY.pack(
        _KEY_BITS + prefix,
        slot,
        generation,
        rule.protocol,
        rule.network.version,
        rule.port.to_bytes(2, "big"),
        pack_address(rule.network.network_address),
    )


def rule_owner(key: bytes) -> tuple[int, int]:
    """The slot and generation a rule's key belongs to."""
    slot, generation = _RULE_OWNER.unpack_from(key)
    return slot, generation


def pack_sandbox_id(sandbox_id: str) -> bytes:
    raw = sandbox_id.encode()
    if not 0 < len(raw) < SANDBOX_ID_SIZE:
        raise ValueError(f"sandbox id {sandbox_id!r} is empty or over {SANDBOX_ID_SIZE - 1} bytes")
    return raw.ljust(SANDBOX_ID_SIZE, b"\0")


def unpack_sandbox_id(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode()


@dataclass(frozen=True)
class Sandbox:
    """What the kernel knows a sandbox by; ``ifindex`` 0: it has no link."""

    slot: int
    cgroup_id: int
    ifindex: int = 0
    address: Address | None = None

    def pack(self) -> bytes:
        return _SANDBOX.pack(self.cgroup_id, self.slot, self.ifindex, pack_address(self.address))

    @classmethod
    def unpack(cls, raw: bytes) -> Sandbox:
        cgroup_id, slot, ifindex, own = _SANDBOX.unpack(raw)
        return cls(slot, cgroup_id, ifindex, unpack_address(own))


@dataclass(frozen=True)
class InForce:
    """The one generation of a slot that counts; generation 0 has no rules and is sealed."""

    generation: int = 0
    mode: Mode = Mode.SEALED

    def pack(self, own: Address | None) -> bytes:
        return _SLOT.pack(self.generation | self.mode << 32, pack_address(own))

    @classmethod
    def unpack(cls, raw: bytes) -> InForce:
        active, _ = _SLOT.unpack(raw)
        return cls(active & 0xFFFFFFFF, Mode(active >> 32))


@dataclass(frozen=True)
class Counters:
    """Packets let out, attempts refused, packets from outside turned away; what the audit holds."""

    allowed: int = 0
    denied: int = 0
    turned_away: int = 0
    recorded: int = 0
    unrecorded: int = 0

    def pack(self) -> bytes:
        return _COUNTERS.pack(
            self.allowed, self.denied, self.turned_away, self.recorded, self.unrecorded
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Counters:
        return cls(*_COUNTERS.unpack(raw))


@dataclass(frozen=True)
class Denial:
    """Equal refusals, counted. ``pid`` 0: the kernel acted outside any process's context."""

    hook: Hook
    reason: Reason
    protocol: int
    address: Address | None
    port: int
    count: int
    last_boottime_ns: int
    pid: int
    command: str

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> Denial:
        _, protocol, hook, reason, port, raw = _DENIAL_KEY.unpack(key)
        count, last_ns, pid, command = _DENIAL.unpack(value)
        return cls(
            hook=Hook(hook),
            reason=Reason(reason),
            protocol=protocol,
            address=unpack_address(raw),
            port=int.from_bytes(port, "big"),
            count=count,
            last_boottime_ns=last_ns,
            pid=pid,
            command=command.partition(b"\0")[0].decode(errors="replace"),
        )
