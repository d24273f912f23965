"""`python -m services.images NAME`: make a base image's archive, or find it, and print its path."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from libhost.command import CommandFailedError
from libhost.errors import UnsupportedError

from . import RECIPES, cached


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.images", description=__doc__)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--cache", type=Path, default=Path("/var/cache/dsec/images"))
    parser.add_argument("--refresh", action="store_true", help="make it anew")
    arguments = parser.parse_args()
    try:
        archive = cached(RECIPES[arguments.name], arguments.cache, refresh=arguments.refresh)
    except (UnsupportedError, CommandFailedError, TimeoutError) as err:
        sys.stderr.write(f"{arguments.name}: {err}\n")
        return 1
    sys.stdout.write(f"{archive}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
