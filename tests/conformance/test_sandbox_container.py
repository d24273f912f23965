"""The container backend on this host, through a whole stack, against the suite."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from libdsec import DSecClient, Sandbox
from tests.conformance.sandbox import CommandCases, FileCases, LifeCases, ProcessCases
from tests.stack import Stack

pytestmark = pytest.mark.e2e


class Container:
    """A sandbox per case: cheap, and no case can spoil another's."""

    @pytest.fixture
    async def sandbox(self, stack: Stack) -> AsyncIterator[Sandbox]:
        async with (
            DSecClient(context=stack.context) as client,
            await client.create(image="busybox", memory_mib=256, disk_mib=128, cpus=1) as made,
        ):
            yield made

    @pytest.fixture
    async def home(self, sandbox: Sandbox) -> str:
        home = f"/home/case-{os.urandom(4).hex()}"
        await sandbox.files.make_dir(home)
        return home


class TestCommands(Container, CommandCases):
    pass


class TestProcesses(Container, ProcessCases):
    pass


class TestFiles(Container, FileCases):
    pass


class TestLife(Container, LifeCases):
    pass
