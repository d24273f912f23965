"""Whether the kernel has AppArmor."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_ENABLED: Final = Path("/sys/module/apparmor/parameters/enabled")


def is_enabled() -> bool:
    try:
        return _ENABLED.read_text().strip() == "Y"
    except FileNotFoundError:  # not compiled in
        return False
