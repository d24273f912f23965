"""Names on the host derive from ids, fit the kernel's limits, and refuse what they cannot hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from libhost.paths import SLOT_PATTERN, NodePaths, slot_of

NODE = NodePaths("n1", Path("/var/lib/dsec/n1"), Path("/run/dsec/n1"))
ID = "n1_abc234_k7v2mq4d3x5a"


def test_grammar_is_as_documented() -> None:
    sandbox = NODE.sandbox(ID)
    slot = slot_of(ID)
    assert sandbox.state_dir == Path(f"/var/lib/dsec/n1/sandboxes/{ID}")
    assert sandbox.agent_socket == Path(f"/run/dsec/n1/live/{slot}/agent.sock")
    assert sandbox.crun_dir == Path(f"/run/dsec/n1/live/crun/{ID}")
    assert sandbox.interface == f"ds{slot}"
    assert NODE.cgroup_name == "dsec-n1"


def test_slots_are_short_and_differ() -> None:
    slots = {slot_of(f"n1_abc234_{number:012}") for number in range(5000)}
    assert len(slots) == 5000
    assert all(SLOT_PATTERN.fullmatch(slot) for slot in slots)
    assert len(NODE.sandbox(ID).interface) <= 15
    assert len(NODE.gateway_interface) <= 15


def test_gateway_of_a_node_is_no_sandbox_interface() -> None:
    assert not SLOT_PATTERN.fullmatch(NODE.gateway_interface[2:])


@pytest.mark.parametrize("name", ["", "N1", "a/b", "a" * 25, "..", "n_1"])
def test_bad_node_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="node name"):
        NodePaths(name, Path("/s"), Path("/r"))


@pytest.mark.parametrize(
    "sandbox_id", ["", "n1", "n1_abc", "n1_../x_y", "n1_abc234_UPPER", "a_b_c_d"]
)
def test_bad_sandbox_id_is_refused(sandbox_id: str) -> None:
    with pytest.raises(ValueError, match="sandbox id"):
        NODE.sandbox(sandbox_id)


def test_run_directory_too_long_for_a_socket_is_refused() -> None:
    longest = Path("/" + "r" * 79)
    NodePaths("n1", Path("/s"), longest)
    assert len(str(NodePaths("n1", Path("/s"), longest).sandbox(ID).agent_socket)) <= 107
    with pytest.raises(ValueError, match="107"):
        NodePaths("n1", Path("/s"), Path("/" + "r" * 90))
