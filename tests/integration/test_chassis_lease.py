"""Leadership on a real bucket: one holder, taken over after a lease, given up at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from libdsec.bus import Bus
from libdsec.wire.envelope import Bucket
from libdsec.wire.lease import LeaseRecord
from services.chassis.kv import KeyValue
from services.chassis.lease import Lease
from services.chassis.topology import ensure_topology

from .conftest import Connect
from .servers import NatsServer

LEASES = Bucket("LEASES", LeaseRecord)
LEASE_S = 0.6


@pytest.fixture
async def kv(bus: Bus) -> KeyValue[LeaseRecord]:
    await ensure_topology(bus, buckets=[LEASES])
    return KeyValue(bus, LEASES)


@asynccontextmanager
async def contending(lease: Lease) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(lease.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_of_many_contenders_one_holds_it(kv: KeyValue[LeaseRecord]) -> None:
    leases = [Lease(kv, "leader", f"h{n}", lease_s=LEASE_S) for n in range(5)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(lease.run()) for lease in leases]
        await until(lambda: any(lease.held for lease in leases))
        for _ in range(20):  # for longer than a lease
            assert sum(lease.held for lease in leases) <= 1
            await asyncio.sleep(LEASE_S / 10)
        for task in tasks:
            task.cancel()


async def test_a_holder_that_dies_is_succeeded_by_a_higher_token(
    kv: KeyValue[LeaseRecord],
) -> None:
    first, second = (Lease(kv, "leader", name, lease_s=LEASE_S) for name in ("a", "b"))
    async with contending(first) as task:
        await until(lambda: first.held)
        async with contending(second):
            await asyncio.sleep(LEASE_S)
            assert not second.held
            task.cancel()  # as if its process had died: nothing is given up
            await until(lambda: second.held)
            assert not first.held  # it was out before the other was in
            assert second.token > first.token


async def test_what_is_given_up_is_taken_without_waiting_a_lease(
    kv: KeyValue[LeaseRecord],
) -> None:
    first, second = (Lease(kv, "leader", name, lease_s=30) for name in ("a", "b"))
    async with contending(first):
        await until(lambda: first.held)
        await first.release()
        assert not first.held
        async with contending(second):
            await until(lambda: second.held)


async def test_a_holder_that_is_cut_off_stops_holding_by_itself(
    nats_server: NatsServer, kv: KeyValue[LeaseRecord], connect: Connect
) -> None:
    lease = Lease(kv, "leader", "a", lease_s=LEASE_S)
    async with contending(lease):
        await until(lambda: lease.held)
        nats_server.freeze()
        await until(lambda: not lease.held, LEASE_S)
        nats_server.thaw()
        await until(lambda: lease.held)


async def test_a_renewal_whose_confirmation_got_lost_does_not_cost_the_lease(
    kv: KeyValue[LeaseRecord],
) -> None:
    lease = Lease(kv, "leader", "a", lease_s=LEASE_S)
    async with contending(lease):
        await until(lambda: lease.held)
        entry = await kv.get("leader")
        assert entry is not None
        await kv.put("leader", LeaseRecord(holder="a", beat=99))  # the write it does not know of
        token = lease.token
        await asyncio.sleep(2 * LEASE_S)
        await until(lambda: lease.held)
        assert lease.token == token
