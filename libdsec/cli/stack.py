"""up, down, status, doctor, demo: hand over to the stack, which is not part of the client.

The stack comes with the extras; the client only finds it and becomes it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Never

import typer

import libdsec

from ..errors import Unsupported
from . import output
from .session import Exit

_VERBS = {
    "up": "Bring a whole DSec up on this machine.",
    "down": "Take it down again.",
    "status": "Show its processes.",
    "doctor": "Say what this machine lacks.",
}
_INSTALLED, _CHECKOUT = "dsec_services", "services"
_DEMO = "demo"
_NEEDED = ("pydantic_settings", "redis", "structlog", "pyroute2")  # the extras bring these


def register(app: typer.Typer) -> None:
    for verb, text in _VERBS.items():
        app.command(
            verb,
            help=f"{text} Arguments go to the stack: dsec {verb} --help.",
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_handover(verb))
    app.command()(demo)


def demo() -> None:
    """Play eight rollouts in real sandboxes; what `make demo` runs."""
    if not _lies_in(_spec(_DEMO), _beside()):
        err = Unsupported(
            "the demonstration is not installed here", hint="run it in a checkout: make demo"
        )
        output.complain(err, as_json=False)
        raise typer.Exit(Exit.REFUSED)
    _become([_DEMO])


def _handover(verb: str) -> Callable[[typer.Context], None]:
    def hand_over(ctx: typer.Context) -> None:
        become_stack([verb, *ctx.args])

    return hand_over


def become_stack(arguments: list[str]) -> Never:
    """Replace this process by the stack's; leaves with 3 where it is not installed."""
    module, missing = stack_module(), [name for name in _NEEDED if _spec(name) is None]
    if module is None or missing:
        lacking = f" ({', '.join(missing)} cannot be imported)" if module and missing else ""
        output.complain(
            Unsupported(
                f"the services are not installed here: only the client is{lacking}",
                hint="pip install 'libdsec[services,host]'",
            ),
            as_json="--json" in arguments,
        )
        raise typer.Exit(Exit.REFUSED)
    _become([module, *arguments])


def stack_module() -> str | None:
    """The stack beside this very client: in site-packages, or in the checkout.

    Somebody else's package called `services` is not it.
    """
    for root in (_INSTALLED, _CHECKOUT):
        if _lies_in(_spec(f"{root}.stack"), _beside()):
            return f"{root}.stack"
    return None


def _become(module_and_arguments: list[str]) -> Never:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", *module_and_arguments])  # noqa: S606


def _beside() -> Path:
    return Path(libdsec.__file__).resolve().parent.parent


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent package is not there
        return None


def _lies_in(spec: ModuleSpec | None, folder: Path) -> bool:
    origin = spec.origin if spec is not None else None
    return origin is not None and Path(origin).resolve().is_relative_to(folder)
