"""`python -m services.stack`: what `dsec up`, `down`, `status` and `doctor` run."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from libdsec.cli import output
from libdsec.cli.output import Json
from libdsec.cli.session import Exit, exit_code
from libdsec.errors import DSecError, PermissionDenied

from . import down as taking_down
from .description import MAX_NODES, load
from .doctor import examine
from .layout import StackPaths
from .seed import make_usable, write_default_context
from .settings import DEFAULT_HOME, passed_on, stack_home
from .supervise import supervise as run_supervisor
from .supervise import teller
from .up import status as ask_status
from .up import up as bring_up

app = typer.Typer(
    name="dsec",
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Home = Annotated[Path | None, typer.Option(help="where the stack lives [DSEC_HOME, /var/lib/dsec]")]


def _paths(home: Path | None) -> StackPaths:
    return StackPaths((home or stack_home()).absolute())


def _refuse(err: DSecError, *, as_json: bool = False) -> NoReturn:
    output.complain(err, as_json=as_json)
    raise typer.Exit(exit_code(err))


def _need_root(*, as_json: bool = False) -> None:
    if os.geteuid() != 0:
        _refuse(
            PermissionDenied("a node needs root", hint="use somebody's stack with DSEC_CONTEXT"),
            as_json=as_json,
        )


def _tell(progress: str) -> None:
    output.say(f"  {progress}")


@app.command()
def up(
    home: Home = None,
    nodes: Annotated[int, typer.Option(min=1, max=MAX_NODES, help="nodes on this machine")] = 1,
    schedulers: Annotated[int, typer.Option(min=1, max=8)] = 1,
    as_json: Json = False,
) -> None:
    """Start everything on this machine, and return when it takes creates."""
    _need_root(as_json=as_json)
    paths = _paths(home)
    try:
        description = asyncio.run(bring_up(paths, nodes=nodes, schedulers=schedulers, say=_tell))
        asyncio.run(make_usable(paths, description, say=_tell))
    except DSecError as err:
        _refuse(err, as_json=as_json)
    context = write_default_context(paths) if paths.home == DEFAULT_HOME else paths.context
    if as_json:
        output.document({"home": str(paths.home), "context": str(context), "nodes": nodes})
        return
    output.say(f"ready: {nodes} node(s); context {context}")
    if paths.home != DEFAULT_HOME:
        output.say(f"export DSEC_CONTEXT={context}")


@app.command()
def down(home: Home = None, as_json: Json = False) -> None:
    """Stop everything and remove what it left on the host; layers and configuration stay."""
    _need_root(as_json=as_json)
    paths = _paths(home)
    try:
        description = load(paths)
    except DSecError as err:
        _refuse(err, as_json=as_json)
    left: list[str] = []
    if description is None:
        output.say(f"no stack in {paths.home}")
    else:
        left = asyncio.run(taking_down.down(paths, description, say=_tell))
    for what in left:
        output.say(f"dsec: not removed: {what}")
    if as_json:
        output.document({"home": str(paths.home), "not_removed": left})
    raise typer.Exit(Exit.REFUSED if left else Exit.DONE)


@app.command()
def status(home: Home = None, as_json: Json = False) -> None:
    """The processes of the stack."""
    paths = _paths(home)
    try:
        processes = asyncio.run(ask_status(paths))
    except PermissionError:
        err = PermissionDenied(f"the stack in {paths.home} is another user's", hint="run as root")
        _refuse(err, as_json=as_json)
    columns = ("name", "pid", "alive", "restarts", "log")
    if as_json:
        output.document(processes)
    elif processes:
        output.table([c.upper() for c in columns], ([p[c] for c in columns] for p in processes))
    else:
        output.say("not running; start it with: dsec up")
    raise typer.Exit(Exit.DONE if processes else Exit.REFUSED)


@app.command()
def doctor(home: Home = None, as_json: Json = False) -> None:
    """What this machine lacks to run DSec, and the way out."""
    checks = list(examine(_paths(home).home))
    if as_json:
        output.document([asdict(check) for check in checks])
    else:
        marks = {True: "missing", False: "without"}
        output.table(
            ("CHECK", "", "FOUND", "WAY OUT"),
            (
                (c.name, "ok" if c.ok else marks[c.needed], c.detail, "" if c.ok else c.hint)
                for c in checks
            ),
        )
    unfit = any(not c.ok and c.needed for c in checks)
    raise typer.Exit(Exit.REFUSED if unfit else Exit.DONE)


@app.command(hidden=True)
def supervise(home: Annotated[Path, typer.Option()]) -> None:
    """The supervisor itself; progress goes to descriptor 3."""
    paths = _paths(home)
    description = load(paths)
    if description is None:
        sys.exit(f"no stack in {paths.home}")
    tell = teller(3)

    def tell_and_close(line: dict[str, object]) -> None:
        tell(line)
        if line.get("done"):
            os.close(3)

    asyncio.run(run_supervisor(paths, description, passed_on(), tell_and_close))


if __name__ == "__main__":
    app(prog_name="dsec")  # whose verbs these are
