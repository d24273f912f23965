"""What more than one tier shares: the one stack of a test run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leftovers import left_on_host
from tests.stack import Stack, running_stack

_REQUIRED = "kernel" in os.environ.get("DSEC_REQUIRE", "").split(",")


LOGS = Path(__file__).parents[1] / "build" / "logs"  # of the stack that failed a test last


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Two nodes on this machine; taken away at the end, with proof that nothing is left."""
    if os.geteuid() != 0 and not _REQUIRED:
        pytest.skip("edges need root")
    with running_stack() as made:
        _ = made.description  # the names to look for, when the home is gone
        yield made
        if request.session.testsfailed:
            shutil.rmtree(LOGS, ignore_errors=True)
            shutil.copytree(made.paths.log, LOGS)
    assert left_on_host(made) == []
