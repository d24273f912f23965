"""What `dsec up` takes from its surroundings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DEFAULT_HOME = Path("/var/lib/dsec")


def stack_home() -> Path:
    """DSEC_HOME, else /var/lib/dsec."""
    return Path(os.environ.get("DSEC_HOME") or DEFAULT_HOME)


def passed_on() -> Mapping[str, str]:
    """Settings that reach every service: OTEL_* and the test hooks; nothing else leaks in."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("OTEL_")
        or name in {"DSEC_LOG_LEVEL", "DSEC_FAULT", "DSEC_TRACE_SAMPLE_RATIO"}
    }
