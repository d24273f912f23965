"""The process around a service: command line, signals, event loop, exit code."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from .log import configure_logging
from .service import Service, serve
from .settings import ServiceSettings
from .version import version

S = TypeVar("S", bound=ServiceSettings)

WRONG_SETTINGS = 2
_IMMEDIATE = 130


def run(
    name: str,
    settings_type: type[S],
    setup: Callable[[Service[S]], Awaitable[None]],
    *,
    speaks_for_node: bool = False,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Be the service `name` until told to stop, then exit.

    Args:
        setup: makes the service what it is; the service is ready when it returns.
        speaks_for_node: answers scattered requests as the node itself, as edges do.
    """
    options = _arguments(name, settings_type).parse_args(argv)
    try:
        settings = settings_type()
    except (ValidationError, SettingsError) as err:
        for fault in _faults(err):
            print(f"dsec-{name}: {fault}", file=sys.stderr)  # noqa: T201
        sys.exit(WRONG_SETTINGS)
    if options.print_config or options.check_config:
        if options.print_config:
            print(json.dumps(settings.redacted(), indent=2))  # noqa: T201
        sys.exit(0)
    configure_logging(
        name, settings.instance, settings.node, level=settings.log_level, fmt=settings.log_format
    )
    identity = settings.node if speaks_for_node else f"{name}.{settings.node or settings.instance}"
    sys.exit(_run_loop(_until_signalled(name, settings, setup, identity)))


async def _until_signalled(
    name: str, settings: S, setup: Callable[[Service[S]], Awaitable[None]], identity: str
) -> int:
    stop = asyncio.Event()

    def ask_to_stop() -> None:
        if stop.is_set():
            os._exit(_IMMEDIATE)  # asked twice: nothing in this process is worth waiting for
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask_to_stop)
    return await serve(name, settings, setup, stop, identity=identity)


def _faults(err: ValidationError | SettingsError) -> list[str]:
    """One line each, naming the variable."""
    if isinstance(err, SettingsError):  # only its text names the field
        field = re.search(r'field "(\w+)"', str(err))
        return [f"DSEC_{field[1].upper()}: not the JSON it should be" if field else str(err)]
    return [
        f"DSEC_{'_'.join(map(str, fault['loc'])).upper()}: {fault['msg']}"
        if fault["loc"]  # else it is about several, which it names
        else fault["msg"].removeprefix("Value error, ")
        for fault in err.errors(include_input=False, include_url=False)
    ]


def _run_loop(main: Coroutine[Any, Any, int]) -> int:
    """On uvloop where it is installed: it takes a third off the bus's CPU time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return int(uvloop.run(main))


def _arguments(name: str, settings_type: type[ServiceSettings]) -> argparse.ArgumentParser:
    lines = [
        f"  DSEC_{field.upper():<24} {info.description or ''}"
        for field, info in settings_type.model_fields.items()
    ]
    parser = argparse.ArgumentParser(
        prog=f"dsec-{name}",
        description=f"The {name} service of DSec. It is configured by environment variables.",
        epilog="environment:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version())
    parser.add_argument("--print-config", action="store_true", help="show the settings and exit")
    parser.add_argument("--check-config", action="store_true", help="check the settings and exit")
    return parser
