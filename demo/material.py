"""What the rollouts work on: the base, a well-known project with a seeded regression, the harness.

Everything is cached below `home`, so that a second run publishes nothing and downloads nothing.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path

from libdsec import DSecClient
from libdsec.errors import NotFound

from .recording import BROKEN, FIXED

PROJECT, VERSION = "toolz", "1.0.0"
HERE = Path(__file__).parent
BASE, WORKSPACE, TOOLKIT, ANSWERS = "python@1", f"{PROJECT}@1", "harness@2", "answers@1"


def source_distribution(cache: Path) -> Path:
    """The project's own sdist, by the machine's ordinary package client."""
    found = list(cache.glob(f"{PROJECT}-{VERSION}.tar.gz"))
    if not found:
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:",
             "--disable-pip-version-check", "-d", str(cache), f"{PROJECT}=={VERSION}"],
            check=True, stdout=sys.stderr,
        )  # fmt: skip
        found = list(cache.glob(f"{PROJECT}-{VERSION}.tar.gz"))
    return found[0]


def workspace_tree(cache: Path) -> Path:
    """The project with its regression, below `repo/`, and a manifest of what it came with."""
    tree = cache / "workspace"
    repo = tree / "repo"
    if (repo / ".manifest.json").exists():
        return tree
    with tarfile.open(source_distribution(cache)) as archive:
        archive.extractall(cache, filter="data")
    tree.mkdir(exist_ok=True)
    (cache / f"{PROJECT}-{VERSION}").rename(repo)
    broken = repo / PROJECT / "itertoolz.py"
    text = broken.read_text()
    if text.count(FIXED) != 1:
        raise RuntimeError(f"{PROJECT} {VERSION} does not contain {FIXED!r} once")
    broken.write_text(text.replace(FIXED, BROKEN))
    manifest = {
        str(p.relative_to(repo)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(repo.rglob("*.py"))
    }
    (repo / ".manifest.json").write_text(json.dumps(manifest))
    return tree


def folder_at(cache: Path, name: str, source: Path, inside: str) -> Path:
    """A tree with the files of `source` at `inside`."""
    tree = cache / name
    target = tree / inside
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".py":
            (target / file.name).write_bytes(file.read_bytes())
    return tree


async def publish(client: DSecClient, cache: Path, base_tar: Path) -> None:
    """Publish the four layers that are not there yet."""
    wanted = (
        (BASE, "base", lambda: base_tar),
        (WORKSPACE, "workspace", lambda: workspace_tree(cache)),
        (TOOLKIT, "toolkit", lambda: folder_at(cache, "toolkit", HERE / "harness", "opt/harness")),
        (ANSWERS, "toolkit", lambda: folder_at(cache, "answers", HERE / "answers", "answers")),
    )
    for name, kind, source in wanted:
        try:
            await client.layers.info(name)
        except NotFound:
            await client.layers.publish(source(), name, kind)
