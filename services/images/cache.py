"""Archives that were made before, found by the fingerprint of their recipe."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from .recipe import Recipe

_FINGERPRINT_CHARS = 16


def cached(recipe: Recipe, directory: Path, *, refresh: bool = False) -> Path:
    """The archive; made first if it is not there. Of two callers at once one makes it.

    Raises:
        UnsupportedError: this machine lacks what the recipe needs.
        CommandFailedError: a tool failed.
    """
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    archive = directory / f"{recipe.name}-{recipe.fingerprint()[:_FINGERPRINT_CHARS]}.tar"
    with (directory / f"{recipe.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists() and not refresh:
            return archive
        with TemporaryDirectory(dir=directory, prefix=f"{recipe.name}-") as work:
            unfinished = Path(work) / "archive.tar"
            recipe.make(unfinished)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(archive)
    return archive
