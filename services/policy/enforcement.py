"""Puts policies in force: compiled here, enforced by the kernel, kept nowhere else.

Synchronous; its caller runs one call at a time, since a change is several steps and two changes of
one sandbox must not mix. The edge numbers a sandbox's policies: a number in force cannot get other
content, and a lower one is a late message.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from libdsec.errors import Conflict, DSecError, InvalidArgument, NoCapacity, NotFound, Unavailable
from libdsec.wire.ids import sandbox_node
from libdsec.wire.policy import ApplyPolicy
from libdsec.wire.sandbox import Denial, PolicySpec
from libhost.bpf.layout import Denial as KernelDenial
from libhost.bpf.layout import InForce
from libhost.bpf.rule import Address, Mode, Protocol
from libhost.bpf.table import PolicyTable
from libhost.errors import BusyError

from .aliases import AliasFile
from .compile import Compiled, compile_network
from .protection import refuse_protected_paths

MAX_GENERATION: Final = 0xFFFFFFFF
# A list of sandboxes is older than a policy that was applied while it travelled.
LIST_MAY_BE_OLD_S: Final = 60.0
_TABLE_FULL: Final = frozenset({errno.E2BIG, errno.ENOSPC, errno.ENOMEM})


@dataclass(frozen=True)
class Applied:
    """`replaced`: another generation was in force before, so there may be flows to end."""

    compiled: Compiled
    replaced: bool


class Enforcement:
    """apply, audit, remove, sweep; all of them idempotent."""

    def __init__(
        self,
        node: str,
        table: PolicyTable,
        aliases: AliasFile,
        *,
        node_addresses: Callable[[], Collection[Address]],
        monotonic: Callable[[], float],
    ) -> None:
        self._node = node
        self._table = table
        self._aliases = aliases
        self._node_addresses = node_addresses
        self._monotonic = monotonic
        self._applied_at: dict[str, float] = {}

    def check(self, policy: PolicySpec) -> Compiled:
        """What the policy would mean here; raises the DSecError that applying it would."""
        refuse_protected_paths(self._node, policy.protected_paths)
        return compile_network(policy.network, self._aliases.current(), self._node_addresses)

    def apply(self, request: ApplyPolicy) -> Applied:
        """When this returns, the policy is what the kernel enforces.

        Raises:
            InvalidArgument, NotFound, PermissionDenied, Unsupported: what is asked for cannot be.
            Conflict: the generation is an older one, or it is in force with other content; or the
                cgroup or interface is another sandbox's.
            NoCapacity: the node's table is full.
        """
        self._check_id(request.sandbox_id)
        compiled = self.check(request.policy)
        address = _link_address(request, compiled.mode)
        wanted = InForce(_generation(request), compiled.mode)
        active = self._table.in_force(request.sandbox_id) or InForce()
        if wanted.generation < active.generation:
            raise Conflict(
                f"generation {wanted.generation} of {request.sandbox_id} came late: "
                f"{active.generation} is in force"
            )
        repeated = self._table.holds(request.sandbox_id, wanted, compiled.rules)
        if wanted.generation == active.generation and not repeated:
            raise Conflict(
                f"generation {wanted.generation} of {request.sandbox_id} is in force with other "
                "content",
                hint="a change needs a higher generation",
            )
        try:
            self._table.register(
                request.sandbox_id,
                request.cgroup_id,
                ifindex=request.ifindex or 0,
                address=address,
            )
            if not repeated:
                self._table.load(request.sandbox_id, wanted.generation, compiled.rules)
                self._table.activate(request.sandbox_id, wanted.generation, compiled.mode)
        except (BusyError, OSError) as err:
            raise _translated(err, request.sandbox_id) from err
        self._applied_at[request.sandbox_id] = self._monotonic()
        return Applied(compiled, replaced=active.generation > 0 and not repeated)

    def remove(self, sandbox_id: str) -> bool:
        """False if there was nothing to remove."""
        self._check_id(sandbox_id)
        self._applied_at.pop(sandbox_id, None)
        return self._table.remove(sandbox_id)

    def sweep(self, sandbox_ids: Collection[str]) -> tuple[list[str], list[str]]:
        """Removes what is in force for nobody of the list; returns that, and who has no policy."""
        recent = self._monotonic() - LIST_MAY_BE_OLD_S
        young = {one for one, at in self._applied_at.items() if at > recent}
        removed = self._table.sweep({*sandbox_ids, *young})
        for sandbox_id in removed:
            self._applied_at.pop(sandbox_id, None)
        known = self._table.sandboxes()
        return removed, [one for one in sandbox_ids if one not in known]

    def audit(
        self, sandbox_id: str, *, wall_s: float, boottime_s: float
    ) -> tuple[list[Denial], int]:
        """What the sandbox was refused, and how many refusals found no room in the record.

        Raises NotFound if no policy is in force for it.
        """
        self._check_id(sandbox_id)
        if sandbox_id not in self._table.sandboxes():
            raise NotFound(f"no policy is in force for sandbox {sandbox_id} on {self._node}")
        booted_at = wall_s - boottime_s
        denials = [_on_the_wire(denial, booted_at) for denial in self._table.denials(sandbox_id)]
        return denials, self._table.counters(sandbox_id).unrecorded

    def count(self) -> int:
        return len(self._table.sandboxes())

    def stray_denied(self) -> int:
        """Refusals to sockets and links of no sandbox: a process that nobody policed."""
        return self._table.stray_counters().denied

    def strays(self) -> list[str]:
        """Which those were, for whoever has to find it."""
        return [
            f"{d.process} {d.target} x{d.count} ({d.rule})"
            for d in (_on_the_wire(denial, 0.0) for denial in self._table.stray_denials())
        ]

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return ("network", f"link={self._table.mechanism.value}")

    def _check_id(self, sandbox_id: str) -> None:
        if sandbox_node(sandbox_id) != self._node:
            raise InvalidArgument(f"sandbox {sandbox_id} does not belong to node {self._node}")


def _generation(request: ApplyPolicy) -> int:
    if not 1 <= request.generation <= MAX_GENERATION:
        raise InvalidArgument(f"generation {request.generation} is not within 1-{MAX_GENERATION}")
    return request.generation


def _link_address(request: ApplyPolicy, mode: Mode) -> Address | None:
    """The sandbox's own address; it has one exactly when it has a link."""
    if (request.ifindex is None) != (request.address is None):
        raise InvalidArgument("a link needs both its ifindex and the sandbox's address")
    if request.address is None:
        if mode is not Mode.SEALED:
            raise Conflict(
                f"sandbox {request.sandbox_id} has no link to the network, and none can be added",
                hint="create it with a policy or a phase that has a network",
            )
        return None
    try:
        return ip_address(request.address)
    except ValueError as err:
        raise InvalidArgument(f"{request.address!r} is no address of a sandbox") from err


def _translated(err: BusyError | OSError, sandbox_id: str) -> DSecError:
    if isinstance(err, BusyError):
        return Conflict(f"the policy of {sandbox_id} cannot be put in force: {err}")
    if err.errno in _TABLE_FULL:
        return NoCapacity(f"this node's policy table has no room for {sandbox_id}: {err.strerror}")
    if err.errno == errno.ENODEV:
        return InvalidArgument(f"the link of {sandbox_id} is not on this host: {err}")
    return Unavailable(f"the kernel refused the policy of {sandbox_id}: {err}")


def _on_the_wire(denial: KernelDenial, booted_at: float) -> Denial:
    names = {int(protocol): protocol.name.lower() for protocol in Protocol}
    protocol = names.get(denial.protocol, f"protocol {denial.protocol}")
    address = denial.address
    peer = f"[{address}]" if address is not None and address.version == 6 else address
    return Denial(
        at=booted_at + denial.last_boottime_ns / 1e9,
        kind="network",
        process=f"{denial.command}[{denial.pid}]" if denial.pid else "",
        target=f"{protocol} {peer}:{denial.port}" if peer is not None else protocol,
        rule=f"{denial.hook.name.lower()}: {denial.reason.name.lower()}",
        count=denial.count,
    )
