"""Verbs whose capability is not built yet: they exist, and say so with exit code 3."""

from __future__ import annotations

from collections.abc import Callable

import typer

from ..errors import Unsupported
from . import output
from .session import Exit

_VERBS = {
    "pack": ("Pack a sandbox's writable layer", "dsec cp a tree out and dsec layers publish it"),
    "project": ("Manage projects", "edit the users file of the stack"),
    "quota": ("Show a project's quota", "dsec queue shows what waits"),
    "burst": ("Show or steer bursting", "dsec nodes shows the local load"),
    "capacity": ("Plan capacity", "dsec nodes shows what is free"),
    "call": ("Run a function", "dsec create and dsec exec"),
}


def register(app: typer.Typer) -> None:
    for verb, (text, instead) in _VERBS.items():
        app.command(
            verb,
            help=f"{text} (not built yet).",
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_refusal(verb, instead))


def _refusal(verb: str, instead: str) -> Callable[[typer.Context], None]:
    def refuse(ctx: typer.Context) -> None:
        err = Unsupported(f"dsec {verb} is not built yet", hint=instead)
        output.complain(err, as_json="--json" in ctx.args)
        raise typer.Exit(Exit.REFUSED)

    return refuse
