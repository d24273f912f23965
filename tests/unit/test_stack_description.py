"""What a stack is made of: kept over restarts, and in nobody's way on the same host."""

from __future__ import annotations

from ipaddress import IPv4Network
from itertools import combinations
from pathlib import Path

import pytest

from libdsec.errors import Conflict, InvalidArgument
from libdsec.wire.ids import NODE
from libhost.paths import NodePaths
from services.stack.description import MAX_NODES, hold_addresses, load, load_or_make
from services.stack.layout import StackPaths


def made(home: Path, nodes: int = MAX_NODES) -> StackPaths:
    paths = StackPaths(home)
    paths.make()
    load_or_make(paths, nodes=nodes, schedulers=1)
    return paths


def test_stacks_of_two_homes_share_no_name_and_no_address(tmp_path: Path) -> None:
    one = load(made(tmp_path / "one"))
    assert one is not None
    with hold_addresses(one):
        two = load(made(tmp_path / "two"))
    assert two is not None
    nodes = [*one.nodes, *two.nodes]
    assert len(nodes) == 2 * MAX_NODES
    assert all(NODE.fullmatch(node.name) for node in nodes)
    assert len({NodePaths(n.name, tmp_path, tmp_path).cgroup_name for n in nodes}) == len(nodes)
    for one, other in combinations(nodes, 2):
        assert not IPv4Network(one.addresses).overlaps(IPv4Network(other.addresses))


def test_addresses_of_a_running_stack_are_nobody_elses(tmp_path: Path) -> None:
    stack = load(made(tmp_path / "one", nodes=1))
    assert stack is not None
    with hold_addresses(stack):
        with pytest.raises(Conflict, match=stack.nodes[0].addresses):
            hold_addresses(stack)
        others = [load(made(tmp_path / f"other{i}", nodes=1)) for i in range(200)]
        taken = {node.addresses for other in others if other for node in other.nodes}
        assert stack.nodes[0].addresses not in taken
    hold_addresses(stack).close()


def test_what_was_decided_is_kept(tmp_path: Path) -> None:
    paths = made(tmp_path, nodes=2)
    assert load_or_make(paths, nodes=2, schedulers=1) == load(paths)
    with pytest.raises(Conflict, match="2 nodes"):
        load_or_make(paths, nodes=3, schedulers=1)


@pytest.mark.parametrize("text", ["", "[]", '{"nodes": []}', '{"nodes": [{"name": "n1"}]}'])
def test_a_broken_description_is_named(tmp_path: Path, text: str) -> None:
    paths = made(tmp_path, nodes=1)
    paths.description.write_text(text)
    with pytest.raises(InvalidArgument, match=r"stack\.json"):
        load(paths)
