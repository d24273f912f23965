"""The kernel tier: every test here needs root and this host's kernel, and leaves nothing on it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .host_state import host_state, leaked

_REQUIRED = "kernel" in os.environ.get("DSEC_REQUIRE", "").split(",")
# What the kernel takes down by itself when its last user is gone, it takes down a little later.
_GRACE_S = 5.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    reason = _why_not()
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.kernel)
            if reason and not _REQUIRED:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str:
    if os.geteuid() != 0:
        return "needs root"
    if not Path("/sys/fs/cgroup").is_dir():
        return "needs cgroups"
    return ""


@pytest.fixture
def node_name() -> str:
    """A name that no other test and nobody else on the host uses."""
    return f"t{secrets.token_hex(4)}"


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compares the host before and after. Of what others may be doing meanwhile, only what bears
    this test's names counts; where the host is ours alone (DSEC_REQUIRE=kernel) everything does."""
    names = [str(request.getfixturevalue(f)) for f in ("node_name", "tmp_path") if
             f in request.fixturenames]  # fmt: skip
    before = host_state()
    yield
    deadline = time.monotonic() + _GRACE_S
    while left := leaked(before, [""] if _REQUIRED else names):
        if time.monotonic() > deadline:
            pytest.fail(f"left on the host: {sorted(left)}", pytrace=False)
        time.sleep(0.05)
