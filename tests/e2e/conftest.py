"""A whole stack for the end-to-end tests: real servers, real services, real containers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from libdsec import DSecClient
from tests.leftovers import left_on_host
from tests.stack import Stack, running_stack

from . import mirror as gateway_mirror
from .mirror import Mirror

_REQUIRED = "kernel" in os.environ.get("DSEC_REQUIRE", "").split(",")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Two nodes on this machine; taken away at the end, with proof that nothing is left."""
    if os.geteuid() != 0 and not _REQUIRED:
        pytest.skip("edges need root")
    with running_stack() as made:
        _ = made.description  # the names to look for, when the home is gone
        yield made
    assert left_on_host(made) == []


@pytest.fixture(scope="session")
def mirror(stack: Stack) -> Iterator[Mirror]:
    """Servers that sandboxes may or may not reach, and the operator's file that says which."""
    with gateway_mirror.serving() as made:
        stack.write_aliases(made.aliases)
        yield made


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[DSecClient]:
    async with DSecClient(context=stack.context) as opened:
        yield opened
