"""`python -m bench NAME [--json]`: measure and print."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

import bench

from .figure import show

_NOT_BENCHES = {"figure", "stack", "baseline", "simulated_edge"}


def main() -> int:
    names = sorted(
        m.name for m in pkgutil.iter_modules(bench.__path__)
        if m.name not in _NOT_BENCHES and not m.name.startswith("_")
    )  # fmt: skip
    parser = argparse.ArgumentParser(prog="python -m bench", description=bench.__doc__)
    parser.add_argument("name", choices=names)
    parser.add_argument("--json", action="store_true", help="one JSON line per figure")
    args, rest = parser.parse_known_args()
    module = importlib.import_module(f"bench.{args.name}")
    show(module.run(rest, quiet=args.json), as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
