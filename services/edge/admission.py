"""The node's last word on a create: a pure decision on facts of the node.

A scheduler's view is seconds old; this one is not. A refusal names the resource that lacks and when
asking again makes sense, so that a scheduler tries another node instead of guessing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from libdsec.errors import DSecError, InvalidArgument, NoCapacity, Unavailable, Unsupported
from libdsec.wire import defaults as d
from libdsec.wire.sandbox import Backend, Qos, Resources, SandboxSpec

SUPPORTED = frozenset({Backend.CONTAINER})


@dataclass(frozen=True)
class NodeFacts:
    """How the node is now; what is being created is in `creating`, not yet in the measurements."""

    available_memory_mib: int
    memory_pressure: float  # PSI some, avg10, percent
    free_disk_mib: int
    free_pids: int
    cores: float
    sandboxes: int  # alive, paused ones too
    creating: int
    creating_memory_mib: int  # sum of their limits
    committed_ls_cpus: float
    policy_ready: bool
    policy_reason: str = ""
    cordoned: bool = False
    draining: bool = False


@dataclass(frozen=True)
class OperatingPoint:
    """What the operator allows the node to be loaded with.

    A sandbox uses a small part of its limits, so memory is judged by what is really free; one
    that is being created counts with its limit divided by `memory_overcommit` until it shows.
    """

    memory_reserve_mib: int = 512
    memory_overcommit: float = 32.0
    max_memory_pressure: float = 20.0
    disk_reserve_mib: int = 1024
    disk_overcommit: float = 64.0
    pids_reserve: int = 1024
    pids_overcommit: float = 8.0
    ls_cpu_share: float = 1.0
    max_creating: int = 256
    max_sandboxes: int = 3200

    def shared(self, share: float) -> OperatingPoint:
        """What counts whole sandboxes, for a part of the host; measured terms are scaled where they
        are measured."""
        return replace(
            self,
            max_creating=max(1, round(self.max_creating * share)),
            max_sandboxes=max(1, round(self.max_sandboxes * share)),
        )


def admit(
    facts: NodeFacts, point: OperatingPoint, spec: SandboxSpec, count: int
) -> tuple[int, DSecError | None]:
    """How many of `count` alike sandboxes fit, and why no more do."""
    for fitting in range(count):
        refusal = refuse(facts, point, spec)
        if refusal is not None:
            return fitting, refusal
        facts = with_one_more(facts, spec)
    return count, None


def refuse(facts: NodeFacts, point: OperatingPoint, spec: SandboxSpec) -> DSecError | None:
    """The reason against one more sandbox, or None."""
    return (
        _unable(spec)
        or _closed(facts)
        or _exhausted(facts, point, spec.resources)
        or _committed(facts, point, spec)
    )


def with_one_more(facts: NodeFacts, spec: SandboxSpec) -> NodeFacts:
    """The facts as they are once this one is being created."""
    ls_cpus = spec.resources.cpus if spec.qos is Qos.LATENCY_SENSITIVE else 0.0
    return replace(
        facts,
        sandboxes=facts.sandboxes + 1,
        creating=facts.creating + 1,
        creating_memory_mib=facts.creating_memory_mib + spec.resources.memory_mib,
        committed_ls_cpus=facts.committed_ls_cpus + ls_cpus,
    )


def _unable(spec: SandboxSpec) -> DSecError | None:
    if spec.backend not in SUPPORTED:
        return Unsupported(
            f"this node has no backend {spec.backend.value!r}",
            hint=f"it has {', '.join(sorted(b.value for b in SUPPORTED))}",
        )
    for name, value, (least, most) in _bounds(spec.resources):
        if not least <= value <= most:
            return InvalidArgument(f"{name} is {value}", hint=f"it is between {least} and {most}")
    if spec.phase is not None and spec.phase not in spec.phases:
        return InvalidArgument(f"phase {spec.phase!r} is not among the request's phases")
    return None


def _bounds(asked: Resources) -> tuple[tuple[str, float, tuple[float, float]], ...]:
    """A caller's own client checks these too, but not everybody uses it."""
    return (
        ("cpus", asked.cpus, d.CPUS_RANGE),
        ("memory_mib", asked.memory_mib, d.MEMORY_MIB_RANGE),
        ("disk_mib", asked.disk_mib, d.DISK_MIB_RANGE),
        ("max_files", asked.max_files, d.MAX_FILES_RANGE),
        ("shm_mib", asked.shm_mib, d.SHM_MIB_RANGE),
        ("pids", asked.pids, d.PIDS_RANGE),
    )


def _closed(facts: NodeFacts) -> DSecError | None:
    if facts.draining:
        return Unavailable("the node is draining", hint="another node takes it")
    if facts.cordoned:
        return Unavailable("the node is cordoned", hint="another node takes it")
    if not facts.policy_ready:
        why = f": {facts.policy_reason}" if facts.policy_reason else ""
        return Unavailable(
            f"the node's policy service is not ready{why}",
            hint="no sandbox starts without its policy",
            retry_after_s=2.0,
        )
    return None


def _exhausted(facts: NodeFacts, point: OperatingPoint, need: Resources) -> DSecError | None:
    coming = (facts.creating_memory_mib + need.memory_mib) / point.memory_overcommit
    if facts.available_memory_mib - coming < point.memory_reserve_mib:
        return _short("memory", f"{facts.available_memory_mib} MiB available", 5.0)
    if facts.memory_pressure > point.max_memory_pressure:
        return _short("memory", f"tasks wait for it {facts.memory_pressure:.0f} % of the time", 5.0)
    disk = facts.free_disk_mib - (facts.creating + 1) * need.disk_mib / point.disk_overcommit
    if disk < point.disk_reserve_mib:
        return _short("disk", f"{facts.free_disk_mib} MiB free", 30.0)
    pids = facts.free_pids - (facts.creating + 1) * need.pids / point.pids_overcommit
    if pids < point.pids_reserve:
        return _short("pids", f"{facts.free_pids} left on the host", 10.0)
    return None


def _committed(facts: NodeFacts, point: OperatingPoint, spec: SandboxSpec) -> DSecError | None:
    if facts.creating >= point.max_creating:
        return _short("creates in flight", f"{facts.creating} of {point.max_creating}", 0.5)
    if facts.sandboxes >= point.max_sandboxes:
        return _short("sandboxes", f"{facts.sandboxes} of {point.max_sandboxes}", 10.0)
    if spec.qos is Qos.LATENCY_SENSITIVE:
        capacity = facts.cores * point.ls_cpu_share
        if facts.committed_ls_cpus + spec.resources.cpus > capacity:
            taken = f"{facts.committed_ls_cpus:g} of {capacity:g} promised"
            return _short("latency-sensitive CPUs", taken, 10.0)
    return None


def _short(resource: str, why: str, retry_after_s: float) -> NoCapacity:
    return NoCapacity(f"the node is out of {resource}: {why}", retry_after_s=retry_after_s)
