"""Names: their grammar, and what derives from a sandbox's id.

    sandbox id   <node>_<incarnation>_<random>      n1_k3f9a2_7h2kq9xw4m3c
    node         [a-z0-9-]{1,24}
    incarnation  6 characters: made anew when a node is re-imaged (its state directory is new)
    random       12 characters (60 bits)
    project      [a-z0-9][a-z0-9_-]{0,63}; it is one subject token

The id routes by itself: any client sends to the node in it, without asking anybody.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import NewType

from ..errors import InvalidArgument

SandboxId = NewType("SandboxId", str)

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # no l, o, 0, 1: ids are read aloud at night
NODE = re.compile(r"[a-z0-9][a-z0-9-]{0,23}")
PROJECT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
SANDBOX = re.compile(
    r"(?P<node>[a-z0-9][a-z0-9-]{0,23})_(?P<incarnation>[a-z2-9]{6})_(?P<random>[a-z2-9]{12})"
)

LAYER_REF = re.compile(
    r"(?:(?P<space>[a-z0-9][a-z0-9_-]{0,63})/)?(?P<name>[a-z0-9][a-z0-9._-]{0,127})"
    r"(?:@(?P<version>[A-Za-z0-9][A-Za-z0-9._-]{0,63}))?"
)
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")


def random_name(length: int) -> str:
    """`length` characters of the id alphabet, 5 bits each."""
    return "".join(_ALPHABET[b & 31] for b in os.urandom(length))


def new_incarnation() -> str:
    return random_name(6)


def new_sandbox_id(node: str, incarnation: str) -> SandboxId:
    return SandboxId(f"{node}_{incarnation}_{random_name(12)}")


def sandbox_node(sandbox_id: str) -> str:
    """The node an id routes to.

    Raises:
        InvalidArgument: the id is not of the grammar.
    """
    return _match(SANDBOX, "sandbox id", sandbox_id, "<node>_<incarnation>_<random>")["node"]


def sandbox_incarnation(sandbox_id: str) -> str:
    return _match(SANDBOX, "sandbox id", sandbox_id, "<node>_<incarnation>_<random>")["incarnation"]


def check_project(project: str) -> str:
    _match(PROJECT, "project", project, "lower-case letters, digits, - and _")
    return project


def check_node(node: str) -> str:
    _match(NODE, "node name", node, "lower-case letters, digits and -, at most 24")
    return node


def parse_layer_ref(ref: str) -> tuple[str | None, str, str | None]:
    """`[space/]name[@version]` → (space, name, version)."""
    m = _match(LAYER_REF, "layer reference", ref, "[project/]name[@version]")
    return m["space"], m["name"], m["version"]


def bucket_of(project: str, buckets: int = 256) -> int:
    """The lane bucket of a project: stable everywhere, so not Python's own hash."""
    return int.from_bytes(hashlib.blake2b(project.encode(), digest_size=4).digest()) % buckets


def _match(pattern: re.Pattern[str], what: str, value: str, grammar: str) -> re.Match[str]:
    m = pattern.fullmatch(value)
    if m is None:
        raise InvalidArgument(f"{what} {value[:80]!r} is not valid", hint=f"it is {grammar}")
    return m
