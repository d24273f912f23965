"""Many sandboxes at once: ask every edge, and say which nodes have not answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from .bus import Gathered
from .concurrent import for_each
from .connection import CALL_TIMEOUT_S, Connection
from .errors import DSecError, InvalidArgument
from .operation import Operation
from .spec import check_labels
from .wire.envelope import Rpc
from .wire.ids import sandbox_node
from .wire.model import Empty, Message
from .wire.node import NodeListing, NodeState
from .wire.sandbox import (
    ById,
    Listing,
    ManyOutcome,
    PauseSandbox,
    SandboxInfo,
    Selection,
    StopSandbox,
)
from .wire.subjects import (
    LIST,
    LIST_ALL,
    NODES,
    PAUSE,
    PAUSE_MANY,
    RESUME,
    RESUME_MANY,
    STOP,
    STOP_MANY,
)

Rep = TypeVar("Rep", bound=Message)

_NODES_S = 2.0
_PARALLEL = 32


@dataclass(frozen=True)
class Coverage:
    """Whom an answer comes from.

    Attributes:
        missing: nodes that did not answer, lost ones included.
        failed: nodes that answered with an error.
        dropped: sandboxes left out because of a limit.
        nodes_known: False when no scheduler said which nodes there are, so that `missing` cannot
            be complete.
    """

    answered: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    failed: Mapping[str, DSecError] = field(default_factory=dict)
    dropped: int = 0
    nodes_known: bool = True


class SandboxListing:
    """An async iterator of SandboxInfo; once it runs, `coverage` says who has not answered."""

    def __init__(
        self, connection: Connection, selection: Selection, timeout_s: float, *, every_project: bool
    ) -> None:
        self._connection = connection
        self._selection = selection
        self._timeout_s = timeout_s
        self._rpc = LIST_ALL if every_project else LIST
        self.coverage = Coverage()

    async def __aiter__(self) -> AsyncGenerator[SandboxInfo, None]:
        with self._connection.operation("list") as op:
            replies = await self._gather(op)
        found = sorted(
            (info for reply in replies.values() for info in reply.sandboxes),
            key=lambda info: (info.created_at, info.sandbox_id),
        )
        for info in found[: self._selection.limit]:
            yield info

    async def _gather(self, op: Operation) -> Mapping[str, Listing]:
        gathered, lost, known = await scatter(
            self._connection, op, self._rpc, self._selection, self._timeout_s
        )
        replies = gathered.replies
        listed = sum(len(reply.sandboxes) for reply in replies.values())
        self.coverage = _coverage(
            gathered,
            lost,
            known,
            dropped=sum(reply.dropped for reply in replies.values())
            + max(0, listed - self._selection.limit),
        )
        return replies


@dataclass(frozen=True)
class Many:
    """What became of many sandboxes: ids done (or, in a dry run, that would be), ids that failed
    with why, and whom the answer comes from."""

    done: tuple[str, ...]
    failed: Mapping[str, str]
    coverage: Coverage


@dataclass(frozen=True)
class Verb:
    """One thing to do to many: as a scatter, and to each of a few."""

    name: str
    to_all: Rpc[Selection, ManyOutcome]


PAUSE_VERB = Verb("pause", PAUSE_MANY)
RESUME_VERB = Verb("resume", RESUME_MANY)
STOP_VERB = Verb("stop", STOP_MANY)


async def do_many(
    connection: Connection,
    verb: Verb,
    labels: Mapping[str, str],
    *,
    dry_run: bool,
    limit: int | None,
    timeout_s: float,
) -> Many:
    """Do it to all that carry these labels, or to the `limit` oldest of them.

    The edges know no common limit, so with one the sandboxes are listed first and addressed one by
    one; without, each edge does its own.
    """
    with connection.operation(f"{verb.name}_many") as op:
        if limit is not None and limit < 1:
            raise InvalidArgument(f"limit={limit} is impossible", hint="1 or more, or None")
        if limit is not None:
            return await _few(connection, op, verb, labels, dry_run, limit, timeout_s)
        selection = Selection(labels=check_labels(labels), dry_run=dry_run)
        gathered, lost, known = await scatter(connection, op, verb.to_all, selection, timeout_s)
        outcomes = gathered.replies.values()
        return Many(
            done=tuple(sorted(name for outcome in outcomes for name in outcome.done)),
            failed={name: why for outcome in outcomes for name, why in outcome.failed.items()},
            coverage=_coverage(gathered, lost, known, dropped=sum(o.dropped for o in outcomes)),
        )


async def _few(
    connection: Connection,
    op: Operation,
    verb: Verb,
    labels: Mapping[str, str],
    dry_run: bool,
    limit: int,
    timeout_s: float,
) -> Many:
    selection = Selection(labels=check_labels(labels), limit=limit)
    listing = SandboxListing(connection, selection, timeout_s, every_project=False)
    chosen = [info.sandbox_id async for info in listing]
    done: list[str] = []
    failed: dict[str, str] = {}

    async def one(sandbox_id: str) -> None:
        try:
            await _to_one(connection, op, verb, sandbox_id, timeout_s)
            done.append(sandbox_id)
        except DSecError as err:
            failed[sandbox_id] = str(err)

    if dry_run:
        done = chosen
    else:
        await for_each(chosen, one, limit=_PARALLEL)
    return Many(tuple(sorted(done)), failed, listing.coverage)


async def _to_one(
    connection: Connection, op: Operation, verb: Verb, sandbox_id: str, timeout_s: float
) -> None:
    node = sandbox_node(sandbox_id)
    if verb is PAUSE_VERB:
        message = PauseSandbox(sandbox_id=sandbox_id)
        await connection.call(PAUSE, message, op=op, node=node, budget_s=timeout_s)
    elif verb is RESUME_VERB:
        by_id = ById(sandbox_id=sandbox_id)
        await connection.call(RESUME, by_id, op=op, node=node, budget_s=timeout_s)
    else:
        stop = StopSandbox(sandbox_id=sandbox_id)
        await connection.call(STOP, stop, op=op, node=node, budget_s=timeout_s)


async def list_nodes(connection: Connection, op: Operation) -> NodeListing:
    """Every node as the schedulers see it."""
    return await connection.call(NODES, Empty(), op=op, budget_s=CALL_TIMEOUT_S)


async def scatter(
    connection: Connection, op: Operation, rpc: Rpc[Selection, Rep], selection: Selection,
    timeout_s: float,
) -> tuple[Gathered[Rep], frozenset[str], bool]:  # fmt: skip
    """Ask every edge; also: the lost nodes, and whether the nodes are known at all.

    It ends as soon as every node that is not lost has answered. Without a scheduler nobody knows
    the nodes, and it takes the whole time.
    """
    bus = await connection.bus()
    try:
        listing = await connection.call(
            NODES, Empty(), op=op, budget_s=_NODES_S, patience_s=_NODES_S
        )  # fmt: skip
        known = True
    except DSecError:
        listing, known = NodeListing(), False
    lost = frozenset(v.heartbeat.node for v in listing.nodes if v.state is NodeState.LOST)
    expect = frozenset(v.heartbeat.node for v in listing.nodes) - lost
    if known and not expect:
        return Gathered({}, {}, frozenset()), lost, known
    gathered = await bus.gather(
        rpc, selection, timeout_s=timeout_s, expect=expect,
        request_id=op.request_id, project=connection.project,
    )  # fmt: skip
    return gathered, lost, known


def _coverage(
    gathered: Gathered[Rep], lost: frozenset[str], known: bool, *, dropped: int
) -> Coverage:
    return Coverage(
        answered=frozenset(gathered.replies),
        missing=gathered.missing | lost,
        failed=gathered.errors,
        dropped=dropped,
        nodes_known=known,
    )
