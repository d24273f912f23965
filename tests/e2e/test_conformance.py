"""A real container, reached through all services, behaves as a sandbox must."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from libdsec import DSecClient, Sandbox
from libdsec.wire.model import random_token
from tests.conformance.sandbox import CommandCases, FileCases, LifeCases, ProcessCases
from tests.stack import IMAGE, Stack

_LIMITS = {"cpus": 2.0, "memory_mib": 256, "disk_mib": 256, "pids": 256}


class Real:
    """A new sandbox for each case: what one leaves behind does not help or hurt the next."""

    @pytest.fixture
    async def sandbox(self, stack: Stack) -> AsyncIterator[Sandbox]:
        async with DSecClient(context=stack.context) as client:
            async with await client.create(image=IMAGE, **_LIMITS) as made:
                yield made

    @pytest.fixture
    async def home(self, sandbox: Sandbox) -> str:
        path = f"/tmp/{random_token(6)}"
        await sandbox.files.make_dir(path, 0o1777)
        return path


class TestCommands(Real, CommandCases):
    pass


class TestProcesses(Real, ProcessCases):
    pass


class TestFiles(Real, FileCases):
    pass


class TestLife(Real, LifeCases):
    pass
