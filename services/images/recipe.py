"""What there is to make, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import busybox, debian


@dataclass(frozen=True)
class Recipe:
    """`fingerprint` changes with everything that decides about the archive's content."""

    name: str
    fingerprint: Callable[[], str]
    make: Callable[[Path], None]


RECIPES: Mapping[str, Recipe] = {
    "busybox": Recipe("busybox", busybox.fingerprint, busybox.make),
    "debian": Recipe("debian", debian.fingerprint, debian.make),
}
