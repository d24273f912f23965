"""What unit tests share: a small DSec on a bus that stays inside the process, and its client."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec import DSecClient
from libdsec.bus import Bus
from tests.world.memory import MemoryServer, memory_bus
from tests.world.world import World


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
async def world(tmp_path: Path, server: MemoryServer) -> AsyncIterator[World]:
    """One node and a scheduler."""
    made = await World(tmp_path / "world").start(lambda name: memory_bus(server, name))
    yield made
    await made.close()
    for bus in made.buses:
        await bus.close()


@pytest.fixture
def memory(server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> MemoryServer:
    """Every client of this test connects to `server`."""

    async def connect(servers: object, *, name: str, inbox_prefix: str, **_: object) -> Bus:
        return await memory_bus(server, name, inbox_prefix)

    monkeypatch.setattr(Bus, "connect", connect)
    return server


@pytest.fixture
def unconfigured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No DSEC_* variable is set, and no context file is where one is looked for."""
    for name in [name for name in os.environ if name.startswith("DSEC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
async def client(
    world: World, memory: MemoryServer, unconfigured: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[DSecClient]:
    monkeypatch.setattr("libdsec.placing._LINGER_S", 0.2)
    async with DSecClient(["memory://"]) as opened:
        yield opened
