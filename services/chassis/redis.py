"""Redis (or Valkey), which holds only the coarse view: every wait short, nothing sent twice.

The library's defaults would raise under load (a pool of 100 that does not wait) and hang for most
of a minute when the server is away, re-sending commands meanwhile that may have been carried out.
Here a caller waits for a connection, then for one answer, and learns within two seconds that there
is none. Whoever writes does so again with the next heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from libdsec.errors import Unavailable

_CONNECTIONS = 16
_WAIT_S = 1.0
_HEALTH_CHECK_S = 10


def connect_redis(url: str) -> Redis:
    """A client that connects when it is first used, and again whenever it must."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_CONNECTIONS,
        timeout=_WAIT_S,
        socket_timeout=_WAIT_S,
        socket_connect_timeout=_WAIT_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=_HEALTH_CHECK_S,
    )
    return Redis.from_pool(pool)


@contextmanager
def redis_errors(what: str) -> Iterator[None]:
    """Turn what the library raises into the error that means "the coarse view is away"."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as err:
        raise Unavailable(
            f"{what}: Redis does not answer ({type(err).__name__})",
            hint="running sandboxes are not affected; placement waits for it",
            retry_after_s=1.0,
        ) from err
