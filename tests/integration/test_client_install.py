"""The wheel in an empty environment: what a user gets who installs the client and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(300)


def run(*argv: str | Path, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, timeout=timeout,
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **env}, cwd="/",
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", into, ROOT)
    if built.returncode and ("No matching distribution" in built.stderr or "ConnectionError" in
                             built.stderr or "Retrying" in built.stderr):  # fmt: skip
        pytest.skip("no package index is reachable: the build back end cannot be had")
    assert built.returncode == 0, built.stderr
    [found] = into.glob("libdsec-*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and its base dependencies; pip's cache is used."""
    home = tmp_path_factory.mktemp("venv")
    assert run(sys.executable, "-m", "venv", home).returncode == 0
    installed = run(home / "bin/pip", "install", "-q", wheel)
    if "No matching distribution" in installed.stderr or "Retrying" in installed.stderr:
        pytest.skip("no package index is reachable: the dependencies cannot be had")
    assert installed.returncode == 0, installed.stderr
    return home / "bin"


def test_the_client_works_without_any_service_dependency(environment: Path) -> None:
    program = (
        "import sys, libdsec, libdsec.sync; from libdsec import *; DSecClient();"
        "assert 'site-packages' in libdsec.__file__;"
        "import importlib.util as u;"
        "absent = [n for n in ('redis', 'structlog', 'pyroute2', 'opentelemetry.sdk')"
        " if u.find_spec(n)];"
        "assert not absent, absent;"
        "assert not u.find_spec('services') and not u.find_spec('tests')"
    )
    done = run(environment / "python", "-c", program, HOME="/nonexistent")
    assert done.returncode == 0, done.stderr


def test_the_command_is_there_and_says_what_is_not_installed(environment: Path) -> None:
    helped = run(environment / "dsec", "--help")
    assert helped.returncode == 0
    assert "create" in helped.stdout
    nowhere = run(environment / "dsec", "ps", HOME="/nonexistent")
    assert nowhere.returncode == 3
    assert "no DSec is configured" in nowhere.stderr


def test_the_stack_is_in_the_wheel_but_needs_the_extras(environment: Path) -> None:
    found = run(
        environment / "python", "-c", "from libdsec.cli.stack import stack_module as s; print(s())"
    )
    assert found.stdout.strip() == "dsec_services.stack", found.stderr
    bare = run(environment / "dsec", "up")
    assert bare.returncode == 3
    assert "libdsec[services,host]" in bare.stderr
