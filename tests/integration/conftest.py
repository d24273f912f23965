"""Fixtures of the integration tier: each test has servers and a directory of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from libdsec.bus import Bus
from libdsec.wire import subjects
from services.chassis.topology import ensure_topology

from .jobs import WORK, WORKER
from .servers import NatsServer, Valkey

Connect = Callable[..., Awaitable[Bus]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.integration)


@pytest.fixture
def nats_config() -> str:
    """Override in a test module for users, permissions, leaf nodes."""
    return ""


@pytest.fixture
def nats_server(tmp_path: Path, nats_config: str) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats", config=nats_config).start()
    yield server
    server.terminate()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    server = Valkey(tmp_path / "valkey").start()
    yield server
    server.terminate()


@pytest.fixture
async def connect(nats_server: NatsServer) -> AsyncIterator[Connect]:
    """Connects buses to the test's server; they are closed at its end."""
    buses: list[Bus] = []

    async def connect(name: str = "test", **options: Any) -> Bus:
        options.setdefault("servers", [nats_server.url])
        buses.append(await Bus.connect(name=name, **options))
        return buses[-1]

    yield connect
    for bus in buses:
        await bus.close()


@pytest.fixture
async def topology(bus: Bus) -> Bus:
    """The bus, with the tests' work queue and the dead letters in place."""
    await ensure_topology(bus, streams=[WORK, subjects.DLQ], durables=[WORKER])
    return bus


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    return await connect("test")
