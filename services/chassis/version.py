"""Which version of DSec runs here."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache
def version() -> str:
    """The installed distribution's; a checkout that is not installed says so."""
    try:
        return metadata.version("libdsec")
    except metadata.PackageNotFoundError:
        return "0.0.0-checkout"
