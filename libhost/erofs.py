"""EROFS images: build one from a directory, check it, mount it straight from its file.

Deterministic: the same tree gives the same bytes, so the digest names the content.
An image on tmpfs or overlayfs cannot be mounted this way (the kernel answers ENOTBLK).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Image:
    """A built image; ``digest`` is ``sha256:<hex>`` of the file's bytes."""

    path: Path
    digest: str
    size_bytes: int


def build_image(directory: Path, image: Path, *, timeout_s: float = 600.0) -> Image:
    """Pack ``directory`` into ``image`` (written beside it first, then renamed)."""
    raise NotImplementedError


def check_image(image: Path, *, timeout_s: float = 600.0) -> None:
    """fsck; raises CommandFailedError for a damaged image."""
    raise NotImplementedError


def digest_file(path: Path) -> str:
    """``sha256:<hex>`` of a file."""
    raise NotImplementedError


def mount_image(image: Path) -> int:
    """Mount read-only, nodev, without a loop device; returns the detached mount's descriptor."""
    raise NotImplementedError
