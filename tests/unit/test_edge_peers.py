"""What an edge makes of a policy service that is not there, silent, or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from libdsec.bus import Bus, Call
from libdsec.errors import Conflict, Unavailable
from libdsec.wire import subjects
from libdsec.wire.policy import ApplyPolicy, PolicyHealth, PolicyInForce
from libdsec.wire.sandbox import PolicySpec
from services.edge import peers
from services.edge.peers import PolicyPeer
from tests.world.memory import MemoryServer, memory_bus

APPLY = ApplyPolicy(sandbox_id="n1_aaaaaa_bbbbbbbbbbbb", generation=2, policy=PolicySpec(),
                    cgroup_id=1)  # fmt: skip
_CALL = cast("Call", None)  # health is an event, of whose call nothing is used


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    bus = await memory_bus(MemoryServer(), "edge")
    yield bus
    await bus.close()


@pytest.fixture
def peer(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> PolicyPeer:
    monkeypatch.setattr(peers, "_APPLY_BUDGET_S", 0.05)
    return PolicyPeer(bus, "n1", lambda: asyncio.get_running_loop().time())


async def test_silence_is_worth_another_try_elsewhere(bus: Bus, peer: PolicyPeer) -> None:
    async def killed(apply: ApplyPolicy, call: Call) -> PolicyInForce:
        await asyncio.sleep(10)
        raise AssertionError("unreachable")

    await bus.serve(subjects.POLICY_APPLY, killed, node="n1")
    with pytest.raises(Unavailable, match="policy service of n1") as told:
        await peer.apply(APPLY)
    assert told.value.retryable


async def test_nobody_there_is_not_asked_again_before_it_is_heard(peer: PolicyPeer) -> None:
    """Else every attempt of every request would be used up on a service that is restarting."""
    healthy = PolicyHealth(node="n1", ready=True)
    await peer.on_health(healthy, _CALL)
    assert peer.health.ready
    with pytest.raises(Unavailable) as told:
        await peer.apply(APPLY)
    assert told.value.retryable
    assert (peer.health.ready, peer.health.reason) == (False, "the policy service does not answer")
    await peer.on_health(healthy, _CALL)
    assert peer.health.ready


async def test_a_refusal_stands_and_another_generation_is_none(bus: Bus, peer: PolicyPeer) -> None:
    async def older(apply: ApplyPolicy, call: Call) -> PolicyInForce:
        if apply.generation == 3:
            raise Conflict("generation 3 is another policy")
        return PolicyInForce(generation=1)

    await bus.serve(subjects.POLICY_APPLY, older, node="n1")
    with pytest.raises(Unavailable, match="generation 1 in force, not 2"):
        await peer.apply(APPLY)
    with pytest.raises(Conflict):
        await peer.apply(APPLY.model_copy(update={"generation": 3}))


async def test_a_policy_service_is_ready_while_it_says_so(bus: Bus) -> None:
    now = 0.0
    peer = PolicyPeer(bus, "n1", lambda: now)
    assert "not been heard of" in peer.health.reason
    await peer.on_health(PolicyHealth(node="n1", ready=True), _CALL)
    assert (peer.health.ready, peer.health.reason) == (True, "")
    now = peers.SILENT_AFTER_S + 0.1
    assert not peer.health.ready
    assert "silent for 3 s" in peer.health.reason
