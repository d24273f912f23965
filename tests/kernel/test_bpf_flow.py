"""A flow that a change denies is ended, not left to stall."""

from __future__ import annotations

import os
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest

from libhost.bpf.rule import Mode, Protocol, Rule
from libhost.flow import EndedFlows, end_flows

from . import sandnet
from .sandnet import OTHER, OUTSIDE, Sandbox, World


@pytest.fixture
def world(tmp_path: Path, node_name: str) -> Iterator[World]:
    sandnet.require()
    with sandnet.world(tmp_path, node_name) as made:
        for address in (OUTSIDE, OTHER):
            made.outside.serve(kind="tcp", address=address, port=80)
        yield made


def netns(sandbox: Sandbox) -> Path:
    return Path(f"/proc/{sandbox.process.pid}/ns/net")


def test_flows_that_are_no_longer_allowed_end_at_once_and_others_go_on(world: World) -> None:
    table = world.open_table()
    sandbox = world.sandbox()
    sandbox.register(table)
    keep, drop = (Rule(Protocol.TCP, ip_network(peer), 80) for peer in (OUTSIDE, OTHER))
    table.load(sandbox.sandbox_id, 1, [keep, drop])
    table.activate(sandbox.sandbox_id, 1, Mode.RULES)
    actor = sandbox.process
    actor.serve(kind="tcp", address="0.0.0.0", port=8000)
    kept = actor.connect(address=OUTSIDE, port=80)
    dropped = [actor.connect(address=peer, port=80) for peer in (OTHER, f"::ffff:{OTHER}")]
    inner = [actor.connect(address=own, port=8000) for own in ("127.0.0.1", str(sandbox.address))]

    table.load(sandbox.sandbox_id, 2, [keep])
    table.activate(sandbox.sandbox_id, 2, Mode.RULES)
    assert end_flows(netns(sandbox), [keep], timeout_s=10) == EndedFlows(ended=2, refused=0)
    for handle in dropped:
        assert actor.read(handle=handle, timeout_s=5) == "ECONNABORTED"
    for handle in (kept, *inner):
        assert actor.talk(handle=handle, text="still", timeout_s=5) == "STILL"
    assert end_flows(netns(sandbox), [keep], timeout_s=10) == EndedFlows(ended=0, refused=0)


def test_the_hosts_own_flows_are_out_of_reach(world: World) -> None:
    with pytest.raises(ValueError, match="own network namespace"):
        end_flows(Path(f"/proc/{os.getpid()}/task/{world.thread_id}/ns/net"), [], timeout_s=5)
