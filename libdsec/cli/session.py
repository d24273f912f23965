"""One run of the command: its client, and what its outcome is as an exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Never

import typer

from ..client import DSecClient
from ..errors import (
    DSecError,
    ExecTimeout,
    FileNotFound,
    InvalidArgument,
    IsADirectory,
    NotADirectory,
    PermissionDenied,
)
from . import output


class Exit(IntEnum):
    DONE = 0
    FAILED = 1  # the command that was run, or the file that was asked for
    USAGE = 2
    REFUSED = 3  # DSec refused, or is not there
    INTERRUPTED = 130


_FAILURES = (ExecTimeout, FileNotFound, IsADirectory, NotADirectory)
_LOCAL: dict[type[OSError], type[DSecError]] = {
    FileNotFoundError: FileNotFound,
    IsADirectoryError: IsADirectory,
    NotADirectoryError: NotADirectory,
    PermissionError: PermissionDenied,
}

Body = Callable[[DSecClient], Awaitable[Exit | None]]


@dataclass(frozen=True)
class Options:
    """What may be said before the verb."""

    context: Path | None = None
    server: str | None = None
    project: str | None = None

    def client(self) -> DSecClient:
        return DSecClient(self.server, project=self.project, context=self.context)


def exit_code(err: DSecError) -> Exit:
    if isinstance(err, _FAILURES):
        return Exit.FAILED
    return Exit.USAGE if isinstance(err, InvalidArgument) else Exit.REFUSED


def run(ctx: typer.Context, body: Body, *, as_json: bool) -> Never:
    """Run `body` with an open client and leave with the code its outcome means."""
    options: Options = ctx.obj

    async def session() -> Exit:
        async with options.client() as client:
            return await body(client) or Exit.DONE

    try:
        code = asyncio.run(session())
    except DSecError as err:
        output.complain(err, as_json=as_json)
        code = exit_code(err)
    except BrokenPipeError:  # who read us has left; typer leaves with 1 and says nothing
        raise
    except OSError as err:
        output.complain(_of_a_local_file(err), as_json=as_json)
        code = Exit.FAILED
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    raise typer.Exit(code)


def _of_a_local_file(err: OSError) -> DSecError:
    """Told as the same error of a file in a sandbox is."""
    kind = next((ours for builtin, ours in _LOCAL.items() if isinstance(err, builtin)), DSecError)
    return kind(f"{err.filename}: {err.strerror}" if err.filename else str(err))


def usage(message: str) -> Never:
    """Refuse what typer's own checks let through."""
    raise typer.BadParameter(message)


def pairs(what: str, texts: list[str] | None) -> dict[str, str]:
    """`name=value` options as a mapping."""
    found: dict[str, str] = {}
    for text in texts or []:
        name, separator, value = text.partition("=")
        if not separator or not name:
            usage(f"{what} {text!r} is not NAME=VALUE")
        found[name] = value
    return found
