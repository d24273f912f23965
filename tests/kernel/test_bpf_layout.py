"""The Python encoding and the C structures are the same, by the object's own type information."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from ipaddress import IPv4Address, ip_network
from typing import Any

import pytest

from libhost.bpf import layout
from libhost.bpf.layout import Counters, Denial, Hook, InForce, Reason, Sandbox
from libhost.bpf.rule import Mode, Protocol, Rule
from libhost.bpf.table import _SIZES

from . import sandnet


@pytest.fixture(scope="module")
def types() -> dict[tuple[str, str], dict[str, Any]]:
    sandnet.require()
    if shutil.which("bpftool") is None:
        pytest.skip("needs bpftool to read the object's type information")
    argv = ["bpftool", "-j", "btf", "dump", "file", str(sandnet.OBJECT)]
    dumped = json.loads(subprocess.run(argv, check=True, capture_output=True, timeout=10).stdout)
    return {(t["kind"], t["name"]): t for t in dumped["types"]}


def field(types: Any, name: str, member: str, packed: bytes, form: str) -> Any:
    """The member of a packed structure, read from where C would read it."""
    kind = types["STRUCT", name]
    assert kind["size"] == len(packed), name
    (offset,) = [m["bits_offset"] // 8 for m in kind["members"] if m["name"] == member]
    return struct.unpack_from("=" + form, packed, offset)[0]


def test_structures_have_the_sizes_the_maps_are_read_with(types: Any) -> None:
    names = {
        "rules": ("rule_key", None), "sandboxes": ("sandbox_key", "sandbox"),
        "slots": (None, "slot"), "counts": (None, "counters"), "denials": ("denial_key", "denial"),
    }  # fmt: skip
    for table, pair in names.items():
        for size, name in zip(_SIZES[table], pair, strict=True):
            assert name is None or types["STRUCT", name]["size"] == size, (table, name)


def test_rule_key_reads_back_in_c(types: Any) -> None:
    key = layout.pack_rule(11, 22, Rule(Protocol.TCP, ip_network("10.0.0.0/8"), 443))
    assert field(types, "rule_key", "prefixlen", key, "I") == 96 + 96 + 8
    assert field(types, "rule_key", "slot", key, "I") == 11
    assert field(types, "rule_key", "generation", key, "I") == 22
    assert field(types, "rule_key", "protocol", key, "B") == 6
    assert field(types, "rule_key", "family", key, "B") == 4
    assert field(types, "rule_key", "port", key, "2s") == (443).to_bytes(2, "big")
    assert field(types, "rule_key", "addr", key, "16s") == layout.pack_address(
        IPv4Address("10.0.0.0")
    )


def test_records_read_back_in_c(types: Any) -> None:
    own = IPv4Address("10.0.0.9")
    record = Sandbox(5, 1 << 40, 7, own).pack()
    assert field(types, "sandbox", "cgroup_id", record, "Q") == 1 << 40
    assert field(types, "sandbox", "slot", record, "I") == 5
    assert field(types, "sandbox", "ifindex", record, "I") == 7
    assert Sandbox.unpack(record) == Sandbox(5, 1 << 40, 7, own)
    active = InForce(9, Mode.RULES).pack(own)
    assert field(types, "slot", "active", active, "Q") == 9 | 1 << 32
    assert field(types, "slot", "own", active, "16s") == layout.pack_address(own)
    assert InForce.unpack(active) == InForce(9, Mode.RULES)
    counters = Counters(1, 2, 3, 4, 5)
    for name in ("allowed", "denied", "turned_away", "recorded", "unrecorded"):
        assert field(types, "counters", name, counters.pack(), "Q") == getattr(counters, name)


def test_denials_are_read_where_c_wrote_them(types: Any) -> None:
    def written(name: str, values: dict[str, tuple[str, Any]]) -> bytes:
        kind = types["STRUCT", name]
        raw = bytearray(kind["size"])
        for member in kind["members"]:
            if member["name"] in values:
                form, value = values[member["name"]]
                struct.pack_into("=" + form, raw, member["bits_offset"] // 8, value)
        return bytes(raw)

    key = written("denial_key", {
        "slot": ("I", 3), "protocol": ("H", 262), "hook": ("B", 2), "reason": ("B", 5),
        "port": ("2s", b"\x01\xbb"), "addr": ("16s", layout.pack_address(IPv4Address("1.2.3.4"))),
    })  # fmt: skip
    value = written("denial", {
        "count": ("Q", 8), "last_ns": ("Q", 99), "pid": ("I", 42), "comm": ("16s", b"curl"),
    })  # fmt: skip
    assert Denial.unpack(key, value) == Denial(
        Hook.CONNECT, Reason.RAW_SOCKET, 262, IPv4Address("1.2.3.4"), 443, 8, 99, 42, "curl"
    )


def test_numbers_mean_the_same_in_both_languages() -> None:
    header = (sandnet.SOURCE / "policy.h").read_text()
    bare = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)

    def values(name: str) -> dict[str, int]:
        (body,) = re.findall(rf"enum {name} {{(.*?)}};", bare, re.DOTALL)
        found: dict[str, int] = {}
        for member in filter(None, map(str.strip, body.split(","))):
            label, _, number = member.partition("=")
            found[label.strip()] = int(number) if number else max(found.values()) + 1
        return found

    assert values("hook") == {f"HOOK_{h.name}": h.value for h in Hook}
    assert values("mode") == {f"MODE_{m.name}": m.value for m in Mode}
    assert values("reason") == {"ALLOWED": 0} | {r.name: r.value for r in Reason}
