"""Which verb answers which subject, and how many of each at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from libdsec.bus import Call
from libdsec.wire import defaults as d
from libdsec.wire import subjects
from libdsec.wire.envelope import Event, Rpc, StreamingRpc
from libdsec.wire.trace import ReportSpans

from ..chassis.service import Service
from .exec import Execs
from .files import Files
from .handlers import SandboxVerbs
from .many import Many
from .offers import Offers
from .operators import Operators
from .processes import Processes

_COMMANDS_AT_ONCE: Final = 20_000  # they wait for their commands, which cost the edge little
_FILES_AT_ONCE: Final = 64
_VERBS_AT_ONCE: Final = 1024
_MARGIN_S: Final = 30.0

Handler = Callable[[Any, Call], Awaitable[Any]]


@dataclass(frozen=True)
class Verbs:
    """Everything that answers."""

    offers: Offers
    sandbox: SandboxVerbs
    execs: Execs
    processes: Processes
    files: Files
    many: Many
    operators: Operators


async def serve_placement(service: Service[Any], offers: Offers) -> None:
    node = service.settings.node
    await service.bus.subscribe(subjects.HEARTBEAT_ACK, offers.heartbeat_ack, node=node)
    await service.bus.subscribe(subjects.VERDICT, offers.verdict, node=node, backlog=20_000)
    await service.bus.serve(subjects.WHOHAS, offers.whohas, concurrency=_VERBS_AT_ONCE)
    at_node: tuple[tuple[Rpc[Any, Any], Handler], ...] = (
        (subjects.OFFER, offers.offer),
        (subjects.ANNOUNCE, offers.announce_again),
        (subjects.WITHDRAW, offers.withdraw),
    )
    for rpc, handler in at_node:
        await service.bus.serve(rpc, handler, node=node, concurrency=_VERBS_AT_ONCE)


async def serve_callers(service: Service[Any], verbs: Verbs) -> None:
    """Last of all: from here on callers are answered."""
    node = service.settings.node
    streams: tuple[tuple[StreamingRpc[Any, Any], Handler], ...] = (
        (subjects.EXEC, verbs.execs.exec),
        (subjects.ATTACH, verbs.execs.attach),
    )
    for stream, handler in streams:
        await service.bus.serve(
            stream,
            handler,
            node=node,
            concurrency=_COMMANDS_AT_ONCE,
            default_budget_s=d.EXEC_TIMEOUT_S + _MARGIN_S,
        )
    for rpc, handler in _on_one_sandbox(verbs):
        await service.bus.serve(rpc, handler, node=node, concurrency=_VERBS_AT_ONCE)
    for rpc, handler in _on_files(verbs.files):
        await service.bus.serve(
            rpc, handler, node=node, concurrency=_FILES_AT_ONCE, backlog=_VERBS_AT_ONCE
        )
    for rpc, handler in _scattered(verbs.many):
        await service.bus.serve(rpc, handler, backlog=_VERBS_AT_ONCE)
    for rpc, handler in _for_operators(verbs.operators):
        await service.bus.serve(rpc, handler, node=node)
    credit: Event[Any] = subjects.EXEC_CREDIT
    await service.bus.subscribe(credit, verbs.execs.credit, node=node, backlog=20_000)
    await _serve_spans(service)


async def _serve_spans(service: Service[Any]) -> None:
    """A client's own spans, which it has nowhere else to keep."""

    async def keep(report: ReportSpans, call: Call) -> None:
        # Whatever it claims to be, it is the subject's project's.
        service.telemetry.ring.add(
            span.model_copy(
                update={"attributes": {**span.attributes, "dsec.project": call.project}}
            )
            for span in report.spans
        )

    await service.bus.subscribe(subjects.REPORT_SPANS, keep, node=service.settings.node)


def _on_one_sandbox(verbs: Verbs) -> tuple[tuple[Rpc[Any, Any], Handler], ...]:
    sandbox, processes = verbs.sandbox, verbs.processes
    return (
        (subjects.EXEC_INPUT, processes.input),
        (subjects.EXEC_SIGNAL, processes.signal),
        (subjects.PROCESSES, processes.list),
        (subjects.INFO, sandbox.info),
        (subjects.METRICS, sandbox.metrics),
        (subjects.PAUSE, sandbox.pause),
        (subjects.RESUME, sandbox.resume),
        (subjects.EXTEND, sandbox.extend),
        (subjects.SET_NETWORK, sandbox.set_network),
        (subjects.SET_PHASE, sandbox.set_phase),
        (subjects.AUDIT, sandbox.audit),
        (subjects.STOP, sandbox.stop),
    )


def _on_files(files: Files) -> tuple[tuple[Rpc[Any, Any], Handler], ...]:
    return (
        (subjects.FILE_READ, files.read),
        (subjects.FILE_WRITE, files.write),
        (subjects.FILE_LIST, files.list),
        (subjects.FILE_STAT, files.stat),
        (subjects.FILE_REMOVE, files.remove),
        (subjects.FILE_RENAME, files.rename),
        (subjects.FILE_MAKE_DIR, files.make_dir),
        (subjects.FILE_SYMLINK, files.symlink),
    )


def _scattered(many: Many) -> tuple[tuple[Rpc[Any, Any], Handler], ...]:
    return (
        (subjects.LIST, many.list),
        (subjects.LIST_ALL, many.list_all),
        (subjects.PAUSE_MANY, many.pause),
        (subjects.RESUME_MANY, many.resume),
        (subjects.STOP_MANY, many.stop),
    )


def _for_operators(operators: Operators) -> tuple[tuple[Rpc[Any, Any], Handler], ...]:
    return (
        (subjects.NODE_CORDON, operators.cordon),
        (subjects.NODE_UNCORDON, operators.uncordon),
        (subjects.NODE_DRAIN, operators.drain),
        (subjects.NODE_CAPABILITIES, operators.capabilities),
    )
