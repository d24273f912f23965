"""The small DSec that the client is tested against behaves as a sandbox must.

A fake that its own suite does not hold to account proves nothing. Pausing it does not claim.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec import DSecClient, Sandbox
from libdsec.bus import Bus
from tests.conformance.sandbox import CommandCases, FileCases, ProcessCases
from tests.world.memory import MemoryServer, memory_bus
from tests.world.world import World


class InMemory:
    @pytest.fixture
    async def sandbox(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Sandbox]:
        server = MemoryServer()

        async def connect(servers: object, *, name: str, inbox_prefix: str, **_: object) -> Bus:
            return await memory_bus(server, name, inbox_prefix)

        monkeypatch.setattr(Bus, "connect", connect)
        monkeypatch.setenv("HOME", str(tmp_path))
        world = await World(tmp_path / "w").start(lambda name: memory_bus(server, name))
        async with DSecClient(["memory://"]) as client:
            yield await client.create(image="busybox")
        await world.close()

    @pytest.fixture
    def home(self, tmp_path: Path) -> str:
        (tmp_path / "home").mkdir()
        return str(tmp_path / "home")


class TestCommands(InMemory, CommandCases):
    pass


class TestProcesses(InMemory, ProcessCases):
    pass


class TestFiles(InMemory, FileCases):
    pass
