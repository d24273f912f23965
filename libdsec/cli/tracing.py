"""trace, logs: what became of a request."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from ..client import DSecClient
from ..span_tree import Node, Trace
from . import output
from .output import Json
from .session import run

# What a span's line says beside its name; the rest is in --json.
_TELLING = ("dsec.sandbox.id", "dsec.phase", "dsec.node", "dsec.reason")


def register(app: typer.Typer) -> None:
    app.command()(trace)
    app.command()(logs)


def trace(ctx: typer.Context, request_id: str, as_json: Json = False) -> None:
    """Show a request as a tree of spans with times, gathered from every process."""

    async def body(client: DSecClient) -> None:
        found = await client.operations.trace(request_id)
        if as_json:
            output.document(_document(found))
            return
        console = output.stdout()
        for root in found.roots:
            _draw(console, root)
        if found.dropped:
            output.say(f"dsec: {found.dropped} older spans have been forgotten, of any request")

    run(ctx, body, as_json=as_json)


def logs(ctx: typer.Context, request_id: str, as_json: Json = False) -> None:
    """Show a request's log lines (not built yet)."""

    async def body(client: DSecClient) -> None:
        for line in await client.operations.logs(request_id):
            print(line)

    run(ctx, body, as_json=as_json)


def _draw(console: Console, root: Node) -> None:
    span = root.span
    console.print(f"trace {span.trace_id}  {root.duration_ms:.1f} ms", soft_wrap=True)
    tree = Tree(_line(root, span.start_ns))
    _grow(tree, root, span.start_ns)
    console.print(tree, soft_wrap=True)
    console.print(
        f"not covered by any span: {root.uncovered_ms:.1f} ms"
        f" ({root.uncovered_share:.0%} of {span.name})",
        soft_wrap=True,
    )


def _grow(tree: Tree, node: Node, origin_ns: int) -> None:
    for child in node.children:
        _grow(tree.add(_line(child, origin_ns)), child, origin_ns)


def _line(node: Node, origin_ns: int) -> Text:
    span = node.span
    where = f"{span.service}@{span.node}" if span.node else span.service
    words = [
        f"{span.name}  {where}",
        f"+{(span.start_ns - origin_ns) / 1e6:.1f} ms  {node.duration_ms:.1f} ms",
    ]
    words += [f"{name.rpartition('.')[2]}={span.attributes[name]}" for name in _TELLING
              if name in span.attributes]  # fmt: skip
    if node.orphan:
        words.append("(its parent is not kept)")
    line = Text("  ".join(words))
    if span.error:
        line.append(f"  {span.error}", style="red")
    return line


def _document(found: Trace) -> dict[str, object]:
    return {
        "request_id": found.request_id,
        "sources": found.sources,
        "dropped": found.dropped,
        "traces": [
            {
                "trace_id": root.span.trace_id,
                "root": root.span.name,
                "duration_ms": root.duration_ms,
                "uncovered_ms": root.uncovered_ms,
                "uncovered_share": root.uncovered_share,
                "spans": [
                    {**node.span.model_dump(mode="json"), "duration_ms": node.duration_ms,
                     "depth": depth}
                    for depth, node in _walk(root, 0)
                ],
            }
            for root in found.roots
        ],
    }  # fmt: skip


def _walk(node: Node, depth: int) -> Iterator[tuple[int, Node]]:
    yield depth, node
    for child in node.children:
        yield from _walk(child, depth + 1)
