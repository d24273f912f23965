"""dsec layers: publish, list, info, remove, import-oci."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ..client import DSecClient
from ..layers import ROOT_OWNER, Upload
from ..wire.layer import LayerInfo
from . import output
from .output import Json
from .session import pairs, run

layers = typer.Typer(
    name="layers", help="Immutable layers that sandboxes are made of.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    app.add_typer(layers)


@layers.command()
def publish(
    ctx: typer.Context,
    source: Annotated[Path, typer.Argument(help="A directory or a tar archive.")],
    name: Annotated[str, typer.Argument(help="name or name@version.")],
    kind: Annotated[str, typer.Option(help="base, workspace, toolkit or diff.")],
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE.")] = None,
    user: Annotated[str | None, typer.Option(help="Who processes run as.")] = None,
    workdir: Annotated[str | None, typer.Option(help="Where processes start.")] = None,
    keep_owner: Annotated[bool, typer.Option(help="Keep uid and gid; else all is root's.")] = False,
    public: Annotated[bool, typer.Option(help="For every project.")] = False,
    as_json: Json = False,
) -> None:
    """Make a layer."""
    variables = pairs("--env", env)

    async def body(client: DSecClient) -> None:
        with output.waiting(f"publishing {name}", quiet=as_json) as tell:

            def told(sent: Upload) -> None:
                whole = f" of {output.size(sent.total_bytes)}" if sent.total_bytes else ""
                tell(f"{output.size(sent.sent_bytes)}{whole} to {sent.node}")

            layer = await client.layers.publish(
                source, name, kind, env=variables, user=user, workdir=workdir,
                owner=None if keep_owner else ROOT_OWNER, public=public, on_progress=told,
            )  # fmt: skip
        _show(layer, as_json=as_json)

    run(ctx, body, as_json=as_json)


@layers.command("list")
def list_(
    ctx: typer.Context,
    kind: str | None = None,
    limit: int = 1000,
    as_json: Json = False,
) -> None:
    """List the layers that can be used."""

    async def body(client: DSecClient) -> None:
        found = await client.layers.list(kind=kind, limit=limit)
        if as_json:
            for layer in found:
                output.document(layer)
        else:
            output.table(("LAYER", "KIND", "SIZE", "FILES", "AGE", "DIGEST"), map(_row, found))
        if found.dropped:
            output.say(f"dsec: {found.dropped} more are not listed")

    run(ctx, body, as_json=as_json)


@layers.command()
def info(ctx: typer.Context, ref: str, as_json: Json = False) -> None:
    """Show one layer; without a version its newest."""

    async def body(client: DSecClient) -> None:
        _show(await client.layers.info(ref), as_json=as_json)

    run(ctx, body, as_json=as_json)


@layers.command()
def remove(ctx: typer.Context, ref: str, as_json: Json = False) -> None:
    """Take a version's name away, unless sandboxes use it."""

    async def body(client: DSecClient) -> None:
        _show(await client.layers.remove(ref), as_json=as_json)

    run(ctx, body, as_json=as_json)


@layers.command("import-oci")
def import_oci(ctx: typer.Context, image: str, name: str, as_json: Json = False) -> None:
    """Make a base layer of an OCI image (not built yet)."""

    async def body(client: DSecClient) -> None:
        _show(await client.layers.import_oci(image, name), as_json=as_json)

    run(ctx, body, as_json=as_json)


def _show(layer: LayerInfo, *, as_json: bool) -> None:
    if as_json:
        output.document(layer)
    else:
        print(f"{layer.ref}  {layer.kind.value}  {output.size(layer.size_bytes)}  {layer.digest}")


def _row(layer: LayerInfo) -> tuple[object, ...]:
    return (
        layer.ref, layer.kind.value, output.size(layer.size_bytes), layer.files,
        output.age(time.time() - layer.created_at), layer.digest[:12],
    )  # fmt: skip
