"""The command's verbs, put together."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from . import cluster, commands, layers, life, stack, tracing, unbuilt
from .session import Options

app = typer.Typer(
    name="dsec",
    help="Sandboxes for agentic reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        print(metadata.version("libdsec"))
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    context: Annotated[
        Path | None, typer.Option(help="Context file; default: DSEC_CONTEXT, else `dsec up`'s.")
    ] = None,
    server: Annotated[str | None, typer.Option(help="NATS servers, separated by commas.")] = None,
    project: Annotated[str | None, typer.Option(help="Whose sandboxes.")] = None,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show it and leave."),
    ] = False,
) -> None:
    """Sandboxes for agentic reinforcement learning."""
    ctx.obj = Options(context, server, project)


stack.register(app)
life.register(app)
commands.register(app)
layers.register(app)
cluster.register(app)
tracing.register(app)
unbuilt.register(app)
