"""One seed of every fault point, and a minute of edge restarts; `make chaos` runs many of both."""

from __future__ import annotations

import pytest

from libdsec import DSecClient
from services.edge.fault import Point
from tests.chaos import campaign, restarts
from tests.stack import Stack

_SEED = 0
_RESTARTS_S = 60.0


@pytest.mark.timeout(240)
async def test_faults_lose_nothing_and_leave_nothing(stack: Stack, client: DSecClient) -> None:
    plan = [(point, _SEED) for point in Point]
    seen = await campaign.run(stack, client, plan, counters=20, batch=len(plan), tell=print)
    assert seen.findings == []
    died = {done.point for done in seen.rounds if done.died}
    assert died == set(Point), "no edge came by where it was to die"
    assert all(done.sandboxes for done in seen.rounds)


@pytest.mark.timeout(180)
async def test_edge_restarts_are_not_noticed(stack: Stack, client: DSecClient) -> None:
    seen = await restarts.run(stack, client, _RESTARTS_S, _SEED, counters=30, tell=print)
    assert seen.findings == []
    assert seen.restarts >= 3
    assert set(seen.deaths) == {"killed", "expired", "stopped"}
