"""What happened to the node's sandboxes, for whoever keeps such records.

Numbered within this process's session: a gap says how many are lost. The outbox sends them in
batches, keeps them while the bus is away, and counts what it had to drop.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry import trace

from libdsec.bus import Bus
from libdsec.wire import subjects
from libdsec.wire.lifecycle import LifecycleBatch, LifecycleRecord
from libdsec.wire.sandbox import State

from ..chassis.clock import Clock
from ..chassis.outbox import Outbox
from .sandbox import Sandbox


class Chronicle:
    """observe() as things happen, while `outbox.run` runs."""

    def __init__(self, bus: Bus, node: str, session: str, clock: Clock) -> None:
        self._clock = clock

        def pack(first: int, records: Sequence[LifecycleRecord]) -> LifecycleBatch:
            return LifecycleBatch(node=node, session=session, first=first, records=tuple(records))

        self.outbox = Outbox(bus, subjects.LIFECYCLE, pack, session=session, node=node)

    def observe(self, sandbox: Sandbox, state: State, reason: str) -> None:
        span = trace.get_current_span().get_span_context()
        self.outbox.put(
            LifecycleRecord(
                sandbox_id=sandbox.id,
                project=sandbox.origin.project,
                request_id=sandbox.origin.request_id,
                state=state.value,
                at=self._clock.wall_s(),
                reason=reason,
                phases_ms=sandbox.status.phases_ms if state is State.READY else {},
                trace_id=f"{span.trace_id:032x}" if span.is_valid else "",
            )
        )
