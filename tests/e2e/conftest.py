"""What end-to-end tests need beside the stack: a client, and servers to reach or not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from libdsec import DSecClient
from tests.stack import Stack

from . import mirror as gateway_mirror
from .mirror import Mirror


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.e2e)


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
