"""`python -m services.stack`: what `dsec up`, `down`, `status` and `doctor` run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from libdsec.errors import DSecError

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
    add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False
)
note = Console(stderr=True, highlight=False)

Home = Annotated[Path | None, typer.Option(help="where the stack lives [DSEC_HOME, /var/lib/dsec]")]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]


def _paths(home: Path | None) -> StackPaths:
    return StackPaths((home or stack_home()).absolute())


def _refuse(err: DSecError) -> NoReturn:
    note.print(f"[red]dsec: {err.code}[/red]: {err}")
    raise typer.Exit(3)


def _need_root() -> None:
    if os.geteuid() != 0:
        note.print("dsec: a node needs root; use somebody's stack with DSEC_CONTEXT instead")
        raise typer.Exit(3)


@app.command()
def up(
    home: Home = None,
    nodes: Annotated[int, typer.Option(min=1, max=MAX_NODES, help="nodes on this machine")] = 1,
    schedulers: Annotated[int, typer.Option(min=1, max=8)] = 1,
    as_json: Json = False,
) -> None:
    """Start everything on this machine, and return when it takes creates."""
    _need_root()
    paths = _paths(home)
    try:
        description = asyncio.run(
            bring_up(paths, nodes=nodes, schedulers=schedulers, say=lambda s: note.print(f"  {s}"))
        )
        asyncio.run(make_usable(paths, description, say=lambda s: note.print(f"  {s}")))
    except DSecError as err:
        _refuse(err)
    context = write_default_context(paths) if paths.home == DEFAULT_HOME else paths.context
    if as_json:
        print(json.dumps({"home": str(paths.home), "context": str(context), "nodes": nodes}))
        return
    note.print(f"ready: {nodes} node(s); context {context}")
    if paths.home != DEFAULT_HOME:
        note.print(f"export DSEC_CONTEXT={context}")


@app.command()
def down(home: Home = None) -> None:
    """Stop everything and remove what it left on the host; layers and configuration stay."""
    _need_root()
    paths = _paths(home)
    try:
        description = load(paths)
    except DSecError as err:
        _refuse(err)
    if description is None:
        note.print(f"no stack in {paths.home}")
        return
    left = asyncio.run(taking_down.down(paths, description, say=lambda s: note.print(f"  {s}")))
    for what in left:
        note.print(f"[red]not removed[/red]: {what}")
    raise typer.Exit(3 if left else 0)


@app.command()
def status(home: Home = None, as_json: Json = False) -> None:
    """The processes of the stack."""
    processes = asyncio.run(ask_status(_paths(home)))
    if as_json:
        print(json.dumps(processes))
    elif processes:
        table = Table("process", "pid", "alive", "restarts", "log")
        for p in processes:
            table.add_row(*(str(p[key]) for key in ("name", "pid", "alive", "restarts", "log")))
        Console().print(table)
    else:
        note.print("not running; start it with: dsec up")
    raise typer.Exit(0 if processes else 3)


@app.command()
def doctor(home: Home = None, as_json: Json = False) -> None:
    """What this machine lacks to run DSec, and the way out."""
    checks = list(examine(_paths(home).home))
    if as_json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        table = Table("check", "", "found", "way out")
        for c in checks:
            mark = "ok" if c.ok else ("missing" if c.needed else "without")
            table.add_row(c.name, mark, c.detail, "" if c.ok else c.hint)
        Console().print(table)
    raise typer.Exit(3 if any(not c.ok and c.needed for c in checks) else 0)


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
    app()
