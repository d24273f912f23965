"""The policy service's verbs; each answers when the kernel already does what it says.

    apply       put a policy in force for a sandbox, at create and at every later change
    check       could this policy be put in force here? what would it add to the sandbox?
    remove      forget a sandbox; it is denied everything from then on
    audit       what a sandbox was refused
    reconcile   forget every sandbox but these

Where the host cannot enforce anything, each of them answers Unsupported with the reason, so that no
sandbox starts there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog

from libdsec.bus import Call
from libdsec.errors import DeadlineExceeded, DSecError, Unsupported
from libdsec.wire.model import Empty
from libdsec.wire.policy import (
    ApplyPolicy,
    AuditPolicy,
    CheckPolicy,
    PolicyAudit,
    PolicyHealth,
    PolicyInForce,
    Reconciled,
    ReconcilePolicy,
    RemovePolicy,
)
from libhost.aio import HostThreads
from libhost.errors import HostError
from libhost.flow import end_flows

from ..chassis.clock import Clock
from .aliases import AliasFile
from .enforcement import Applied, Enforcement
from .metrics import PolicyMetrics

_CALL_TIMEOUT_S = 5.0
_FLOWS_TIMEOUT_S = 3.0
_FLOW_THREADS = 4

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger(__name__)


class Verbs:
    """One node's handlers. `enforcement` None: `reason` is why nothing can be enforced."""

    def __init__(
        self, enforcement: Enforcement | None, reason: str, metrics: PolicyMetrics, clock: Clock
    ) -> None:
        self._enforcement = enforcement
        self._reason = reason
        self._metrics = metrics
        self._clock = clock
        # One thread: changes to the table happen one after the other, in the order of arrival.
        self._table_thread = HostThreads(1)
        self._flow_threads = HostThreads(_FLOW_THREADS)

    def close(self) -> None:
        self._table_thread.close()
        self._flow_threads.close()

    async def apply(self, request: ApplyPolicy, call: Call) -> PolicyInForce:
        """Raises what Enforcement.apply does."""
        began_s = self._clock.monotonic_s()
        try:
            applied = await self._on_table(self._enforcing().apply, request)
        except DSecError as err:
            self._metrics.refused(err.code)
            raise
        self._metrics.applied(request.policy.network.mode, self._clock.monotonic_s() - began_s)
        await self._end_flows(request, applied)
        return _in_force(request.generation, applied)

    async def check(self, request: CheckPolicy, call: Call) -> PolicyInForce:
        compiled = await self._on_table(self._enforcing().check, request.policy)
        return _in_force(0, Applied(compiled, replaced=False))

    async def remove(self, request: RemovePolicy, call: Call) -> Empty:
        await self._on_table(self._enforcing().remove, request.sandbox_id)
        return Empty()

    async def audit(self, request: AuditPolicy, call: Call) -> PolicyAudit:
        denials, dropped = await self._on_table(
            self._enforcing().audit,
            request.sandbox_id,
            wall_s=self._clock.wall_s(),
            boottime_s=time.clock_gettime(time.CLOCK_BOOTTIME),
        )
        return PolicyAudit(sandbox_id=request.sandbox_id, denials=tuple(denials), dropped=dropped)

    async def reconcile(self, request: ReconcilePolicy, call: Call) -> Reconciled:
        removed, missing = await self._on_table(self._enforcing().sweep, request.sandbox_ids)
        if removed:
            log.info("removed policies of sandboxes that are gone", sandboxes=removed[:20])
        return Reconciled(removed=len(removed), missing=tuple(missing))

    async def health(self, aliases: AliasFile) -> PolicyHealth:
        """Asked through the same thread as everything else: one that hangs is not well."""
        if self._enforcement is None:
            return PolicyHealth(ready=False, reason=self._reason)
        try:
            await self._on_table(aliases.current)
        except DeadlineExceeded as err:
            return PolicyHealth(ready=False, reason=err.message)
        reason = f"alias file {aliases.path}: {aliases.problem}" if aliases.problem else ""
        return PolicyHealth(ready=True, reason=reason, mechanisms=self._enforcement.mechanisms)

    async def _on_table(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await self._table_thread.run(_CALL_TIMEOUT_S, function, *args, **kwargs)
        except TimeoutError as err:
            raise DeadlineExceeded(
                "the kernel did not take the change of a policy in time",
                hint="nothing may be assumed to be in force; asking again is safe",
            ) from err

    def _enforcing(self) -> Enforcement:
        if self._enforcement is None:
            raise Unsupported(
                f"no network policy can be enforced on this node: {self._reason}",
                hint="sandboxes never start without one; `dsec doctor` says what the host lacks",
            )
        return self._enforcement

    async def _end_flows(self, request: ApplyPolicy, applied: Applied) -> None:
        """The new rules hold already: a flow that cannot be ended stalls, nothing passes."""
        if not applied.replaced or request.netns_path is None:
            return
        netns, rules = Path(request.netns_path), applied.compiled.rules
        try:
            flows = await self._flow_threads.run(
                _FLOWS_TIMEOUT_S + 1,
                lambda: end_flows(netns, rules, timeout_s=_FLOWS_TIMEOUT_S),
            )
        except (HostError, OSError, ValueError, TimeoutError) as err:
            log.warning("flows were not ended", sandbox=request.sandbox_id, error=str(err))
            return
        self._metrics.flows(ended=flows.ended, stalled=flows.refused)
        log.info("flows ended", sandbox=request.sandbox_id, ended=flows.ended)


def _in_force(generation: int, applied: Applied) -> PolicyInForce:
    return PolicyInForce(
        generation=generation,
        env=dict(applied.compiled.env),
        hosts=dict(applied.compiled.hosts),
    )
