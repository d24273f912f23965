"""The house rules that a program can check."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("libdsec", "libhost", "services", "bench", "demo", "scripts", "tests")


def sources(*folders: str, suffix: str = ".py") -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob(f"*{suffix}"))


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not installed; `make setup` installs it")
    return found


def test_ruff_finds_nothing() -> None:
    done = run(tool("ruff"), "check", "--output-format=concise", ".")
    assert done.returncode == 0, done.stdout


def test_ruff_format_changes_nothing() -> None:
    done = run(tool("ruff"), "format", "--check", ".")
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(300)
def test_mypy_finds_nothing() -> None:
    done = run(tool("mypy"))
    assert done.returncode == 0, done.stdout


def test_import_rules_hold() -> None:
    done = run(tool("lint-imports"))
    assert done.returncode == 0, done.stdout


def test_subject_strings_appear_in_one_place() -> None:
    pattern = re.compile(r"[\"'f]dsec\.v1\.")
    allowed = {ROOT / "libdsec/wire/subjects.py", ROOT / "services/stack/nats_config.py"}
    found = [
        str(path.relative_to(ROOT))
        for path in sources("libdsec", "libhost", "services")
        if path not in allowed and pattern.search(path.read_text())
    ]
    assert not found, f"subjects belong in libdsec/wire/subjects.py: {found}"


def test_no_file_is_long() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in [*sources(*CODE), *sources("aether", "libhost", suffix=".c")]
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long, f"files over 400 lines want a seam: {long}"


def test_module_names_say_what_is_inside() -> None:
    forbidden = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
    found = [
        str(p.relative_to(ROOT))
        for p in sources("libdsec", "libhost", "services")
        if p.stem in forbidden
    ]
    assert not found


def test_services_import_their_own_package_relatively() -> None:
    """The wheel installs services/ under another name, so an absolute import would not be found."""
    pattern = re.compile(r"^\s*(from|import) services\b", re.MULTILINE)
    found = [str(p.relative_to(ROOT)) for p in sources("services") if pattern.search(p.read_text())]
    assert not found


def test_nothing_names_a_registry_or_a_private_path() -> None:
    pattern = re.compile(
        r"://(?:deb|snapshot|security)\.deb|://pypi\.|python" + r"hosted|registry\.npm"
        r"|(?:^|[^\w./-])/(?:work|farm)/"
    )
    listed = run("git", "ls-files", "-z").stdout.split("\0")
    found = []
    for name in listed:
        path = ROOT / name
        if not name or path == Path(__file__) or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if pattern.search(text):
            found.append(name)
    assert not found
