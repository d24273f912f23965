"""The `dsec` command. Exit codes: 0 done, 1 the command failed, 2 bad usage, 3 DSec refused or is
not there."""

from __future__ import annotations


def main() -> None:
    """What the installed script runs; typer and rich are loaded only here."""
    from .app import app

    app()
