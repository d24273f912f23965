"""Redis away, slow and busy: typed, quickly, and over by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from libdsec.errors import Unavailable
from services.chassis.redis import connect_redis, redis_errors

from .servers import Valkey


@pytest.fixture
async def redis(valkey: Valkey) -> AsyncIterator[Redis]:
    client = connect_redis(valkey.url)
    yield client
    await client.aclose()


async def count(redis: Redis) -> int:
    with redis_errors("counting"):
        return int(await redis.incr("n"))


async def test_more_callers_than_connections_wait_instead_of_failing(redis: Redis) -> None:
    counts = await asyncio.gather(*(count(redis) for _ in range(300)))
    assert sorted(counts) == list(range(1, 301))


async def test_a_server_that_is_away_is_unavailable_soon_and_comes_back_by_itself(
    valkey: Valkey, redis: Redis
) -> None:
    assert await count(redis) == 1
    valkey.kill()
    async with asyncio.timeout(3):
        with pytest.raises(Unavailable, match="counting: Redis does not answer"):
            await count(redis)
    valkey.start()
    assert await count(redis) == 1  # a fresh server: nothing of it was durable


async def test_a_server_that_hangs_is_unavailable_soon_and_nothing_is_sent_twice(
    valkey: Valkey, redis: Redis
) -> None:
    assert await count(redis) == 1
    valkey.freeze()
    async with asyncio.timeout(4):
        with pytest.raises(Unavailable):
            await count(redis)
    valkey.thaw()
    assert await count(redis) == 3  # the one that timed out was carried out once
