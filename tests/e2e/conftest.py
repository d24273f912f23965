"""A whole stack for the end-to-end tests: real servers, real services, real containers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from libdsec import DSecClient
from tests.leftovers import on_this_host
from tests.stack import Stack, running_stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Two nodes on this machine; taken away at the end, with proof that nothing is left."""
    if os.geteuid() != 0:
        pytest.skip("edges need root")
    before = on_this_host()
    with running_stack() as made:
        yield made
    assert on_this_host() - before == set(), "left on the host after `dsec down`"


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[DSecClient]:
    async with DSecClient(context=stack.context) as opened:
        yield opened
