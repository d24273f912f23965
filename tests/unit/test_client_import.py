"""Importing the client: quick, complete, and without what only services need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import libdsec

ROOT = Path(__file__).parents[2]


def modules_after(statement: str) -> set[str]:
    program = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True,
        timeout=30,
    )  # fmt: skip
    return set(json.loads(done.stdout))


def test_the_bare_import_loads_nothing_heavy() -> None:
    heavy = {"nats", "pydantic", "opentelemetry", "asyncio", "ssl", "typer", "rich"}
    assert not heavy & modules_after("import libdsec")


def test_the_client_needs_no_service_and_no_host() -> None:
    loaded = modules_after("from libdsec import *; import libdsec.sync")
    foreign = {"redis", "libhost", "services", "structlog", "prometheus_client", "typer", "rich",
               "opentelemetry.sdk", "psutil", "pyroute2", "ctypes.util"}  # fmt: skip
    assert not foreign & loaded
    assert {"nats", "pydantic", "libdsec.client"} <= loaded


def test_every_public_name_is_there_and_no_other() -> None:
    for name in libdsec.__all__:
        assert getattr(libdsec, name) is not None
    assert sorted(libdsec.__all__) == sorted(libdsec._HOME)
    assert set(libdsec.__all__) <= set(dir(libdsec))
    assert not hasattr(libdsec, "nothing_of_that_name")
