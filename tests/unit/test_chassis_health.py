"""The health server: liveness is the loop's pulse, readiness is named facts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from services.chassis.clock import Clock
from services.chassis.health import Health, HealthServer, Pulse


@pytest.fixture
async def health() -> AsyncIterator[Health]:
    pulse = Pulse(Clock(), 0.3, lambda lag_s: None)
    beating = asyncio.create_task(pulse.beat())
    yield Health(CollectorRegistry(), pulse)
    beating.cancel()


@pytest.fixture
async def port(health: Health) -> AsyncIterator[int]:
    server = HealthServer(health)
    yield await server.start("127.0.0.1", 0)
    await server.stop()


async def ask(port: int, request: bytes) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


async def get(port: int, path: str) -> tuple[int, str]:
    return await ask(port, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())


async def test_a_loop_that_stalled_is_unhealthy(health: Health, port: int) -> None:
    assert (await get(port, "/healthz"))[0] == 200
    time.sleep(0.8)  # the stall itself: nothing else on this loop runs
    async with asyncio.timeout(5):
        while (await get(port, "/healthz"))[0] != 503:
            await asyncio.sleep(0)


async def test_readiness_names_what_is_missing(health: Health, port: int) -> None:
    health.checks["nats"] = lambda: True
    health.checks["redis"] = lambda: False
    status, body = await get(port, "/readyz?verbose")
    assert status == 503
    assert json.loads(body)["checks"] == {"not draining": True, "nats": True, "redis": False}
    health.checks["redis"] = lambda: True
    assert (await get(port, "/readyz"))[0] == 200
    health.draining = True
    assert (await get(port, "/readyz"))[0] == 503


async def test_state_too_large_to_show_says_how_large(health: Health, port: int) -> None:
    health.views["small"] = lambda: 1
    health.views["large"] = lambda: "x" * (2 << 20)
    _, body = await get(port, "/debug/state")
    assert json.loads(body)["too large to show, bytes"]["large"] > 2 << 20


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /other HTTP/1.1\r\n\r\n", 404),
        (b"GET\r\n\r\n", 405),
        (b"\xff\xfe\r\n\r\n", 405),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 0),  # closed without an answer
    ],
)
async def test_nonsense_is_refused(port: int, request_line: bytes, status: int) -> None:
    try:
        assert (await ask(port, request_line))[0] == status
    except ConnectionResetError:
        assert status == 0
    assert (await get(port, "/healthz"))[0] == 200


async def test_tasks_are_listed(port: int) -> None:
    forever = asyncio.create_task(asyncio.Event().wait(), name="waits for ever")
    _, body = await get(port, "/debug/tasks")
    assert "waits for ever" in body
    forever.cancel()
