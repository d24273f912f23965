"""nodes, cordon, drain, uncordon, queue, dlq."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated

import typer

from ..client import DSecClient
from ..operations import Operations
from ..wire.deadletter import DeadLetter, DeadLetterOutcome
from ..wire.node import NodeState, NodeView
from . import output
from .output import Json
from .session import Exit, run

dlq = typer.Typer(
    name="dlq", help="Messages that nobody could handle; for operators.", no_args_is_help=True
)

Seqs = Annotated[list[int], typer.Argument(metavar="SEQ...")]


def register(app: typer.Typer) -> None:
    app.command()(nodes)
    app.command()(cordon)
    app.command()(uncordon)
    app.command()(drain)
    app.command()(queue)
    app.add_typer(dlq)


def nodes(
    ctx: typer.Context,
    capabilities: Annotated[
        bool, typer.Option(help="What each probe found; for operators.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the nodes: state, load, what they can do."""

    async def body(client: DSecClient) -> None:
        views = await client.nodes()
        if capabilities:
            await _show_capabilities(client.operations, views, as_json=as_json)
        elif as_json:
            for view in views:
                output.document(view)
        else:
            output.table(
                ("NODE", "STATE", "BACKENDS", "LOAD", "RUNNING", "PAUSED", "CREATING", "FREE",
                 "SERVICES", "CAPABILITIES", "SEEN"),
                map(_row, views),
            )  # fmt: skip

    run(ctx, body, as_json=as_json)


def cordon(ctx: typer.Context, node: str, as_json: Json = False) -> None:
    """Place nothing more on a node; for operators."""
    _order(ctx, Operations.cordon, node, as_json=as_json)


def uncordon(ctx: typer.Context, node: str, as_json: Json = False) -> None:
    """Take a node into service again; for operators."""
    _order(ctx, Operations.uncordon, node, as_json=as_json)


def drain(ctx: typer.Context, node: str, as_json: Json = False) -> None:
    """Cordon a node until what runs there has ended by itself; for operators."""
    _order(ctx, Operations.drain, node, as_json=as_json)


def queue(ctx: typer.Context, as_json: Json = False) -> None:
    """How many requests wait, and for how long."""

    async def body(client: DSecClient) -> None:
        lanes = await client.queue()
        if as_json:
            for lane in lanes:
                output.document(lane)
        else:
            output.table(
                ("LANE", "WAITING", "UNDER WAY", "OLDEST"),
                (
                    (lane.lane, lane.waiting, lane.delivered, output.age(lane.oldest_age_s))
                    for lane in lanes
                ),
            )

    run(ctx, body, as_json=as_json)


@dlq.command("list")
def list_(ctx: typer.Context, limit: int = 100, as_json: Json = False) -> None:
    """List dead letters, the oldest first."""

    async def body(client: DSecClient) -> None:
        listing = await client.operations.dead_letters(limit=limit)
        if as_json:
            for letter in listing.letters:
                output.document(letter)
        else:
            output.table(
                ("SEQ", "AT", "SUBJECT", "TRIES", "BYTES", "REASON"), map(_letter, listing.letters)
            )
        if (left := listing.total - len(listing.letters)) > 0:
            output.say(f"dsec: {left} more are not listed")

    run(ctx, body, as_json=as_json)


@dlq.command()
def replay(ctx: typer.Context, seqs: Seqs, as_json: Json = False) -> None:
    """Publish dead letters again, as they were."""
    _settle(ctx, Operations.replay, seqs, as_json=as_json)


@dlq.command()
def discard(ctx: typer.Context, seqs: Seqs, as_json: Json = False) -> None:
    """Forget dead letters."""
    _settle(ctx, Operations.discard, seqs, as_json=as_json)


def _order(
    ctx: typer.Context,
    order: Callable[[Operations, str], Awaitable[None]],
    node: str,
    *,
    as_json: bool,
) -> None:
    async def body(client: DSecClient) -> None:
        await order(client.operations, node)
        if as_json:
            output.document({"node": node})

    run(ctx, body, as_json=as_json)


def _settle(
    ctx: typer.Context,
    settle: Callable[[Operations, list[int]], Awaitable[DeadLetterOutcome]],
    seqs: list[int],
    *,
    as_json: bool,
) -> None:
    async def body(client: DSecClient) -> Exit:
        outcome = await settle(client.operations, seqs)
        if as_json:
            output.document(outcome)
        else:
            for seq in outcome.done:
                print(seq)
        for seq, why in outcome.failed.items():
            output.say(f"dsec: {seq}: {why}")
        return Exit.REFUSED if outcome.failed else Exit.DONE

    run(ctx, body, as_json=as_json)


async def _show_capabilities(
    operations: Operations, views: list[NodeView], *, as_json: bool
) -> None:
    rows: list[tuple[str, str, str, str]] = []
    for view in views:
        if view.state is NodeState.LOST:
            output.say(f"dsec: node {view.heartbeat.node} is lost")
            continue
        found = await operations.capabilities(view.heartbeat.node)
        if as_json:
            output.document(found)
        rows += [
            (found.node, name, value, found.reasons.get(name, ""))
            for name, value in sorted(found.facts.items())
        ]
    if not as_json:
        output.table(("NODE", "CAPABILITY", "VALUE", "WHY"), rows)


def _row(view: NodeView) -> tuple[object, ...]:
    beat = view.heartbeat
    marks = [mark for mark, set_ in (("cordoned", beat.cordoned), ("draining", beat.draining))
             if set_]  # fmt: skip
    missing = [
        name
        for name, ready in (("policy", beat.policy_ready), ("snapshotter", beat.snapshotter_ready))
        if not ready
    ]
    return (
        beat.node,
        " ".join([view.state.value, *marks]),
        " ".join(beat.backends),
        f"{beat.load.value:.0%}",
        f"{beat.running}/{beat.max_sandboxes}" if beat.max_sandboxes else beat.running,
        beat.paused,
        beat.creating,
        output.size(beat.free_memory_mib << 20),
        f"no {', '.join(missing)}" if missing else "ready",
        " ".join(beat.capabilities),
        f"{view.age_s:.1f}s ago",
    )


def _letter(letter: DeadLetter) -> tuple[object, ...]:
    at = datetime.fromtimestamp(letter.at, UTC).isoformat(sep=" ", timespec="seconds")
    return letter.seq, at, letter.subject, letter.deliveries, len(letter.payload), letter.reason
