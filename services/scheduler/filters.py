"""Which nodes can take a request: one yes or no each, of a node's heartbeat and a need. Pure.

A *lasting* filter is about what a node is: if no known node passes it, waiting is pointless and
the caller is told at once. A *passing* one is about how a node is just now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from libdsec.wire.node import Heartbeat, NodeState
from libdsec.wire.sandbox import NetworkPublic, PolicySpec, Qos, SandboxSpec


@dataclass(frozen=True)
class Need:
    """What a request asks of a node. Hashable parts only are in `signature`."""

    spec: SandboxSpec
    pools: frozenset[str] = frozenset({"local"})
    avoid: frozenset[str] = frozenset()  # nodes that have failed it before: others are better

    @property
    def capabilities(self) -> frozenset[str]:
        """What a node must be able to enforce for every policy this sandbox may come under."""
        policies = (self.spec.policy, *self.spec.phases.values())
        return frozenset(name for policy in policies for name in _enforced(policy))

    @property
    def signature(self) -> tuple[object, ...]:
        """Needs with the same signature pass the same filters."""
        resources = self.spec.resources
        return (
            self.spec.backend,
            self.capabilities,
            self.pools,
            self.spec.qos,
            resources.cpus,
            resources.memory_mib,
            resources.disk_mib,
        )


def _enforced(policy: PolicySpec) -> Iterator[str]:
    if isinstance(policy.network, NetworkPublic):
        yield "egress"
    if policy.protected_paths:
        yield "protected_paths"


Filter = Callable[[Heartbeat, Need], bool]


def runs_backend(beat: Heartbeat, need: Need) -> bool:
    return need.spec.backend.value in beat.backends


def can_enforce(beat: Heartbeat, need: Need) -> bool:
    return need.capabilities <= set(beat.capabilities)


def has_memory(beat: Heartbeat, need: Need) -> bool:
    return not beat.memory_mib or need.spec.resources.memory_mib <= beat.memory_mib


def has_cpus(beat: Heartbeat, need: Need) -> bool:
    """A best-effort sandbox is only limited by its number, so a node may have fewer; a
    latency-sensitive one is promised it."""
    limit_only = need.spec.qos is not Qos.LATENCY_SENSITIVE
    return limit_only or not beat.cpus or need.spec.resources.cpus <= beat.cpus


def has_disk(beat: Heartbeat, need: Need) -> bool:
    return not beat.disk_mib or need.spec.resources.disk_mib <= beat.disk_mib


def in_pool(beat: Heartbeat, need: Need) -> bool:
    return beat.pool in need.pools


def is_open(beat: Heartbeat, need: Need) -> bool:
    return not beat.cordoned and not beat.draining


def policy_ready(beat: Heartbeat, need: Need) -> bool:
    return beat.policy_ready


def memory_left(beat: Heartbeat, need: Need) -> bool:
    return beat.load.memory < 1.0


# In this order; a node counts for the first filter that drops it.
LASTING: Final[dict[str, Filter]] = {
    "backend": runs_backend,
    "capability": can_enforce,
    "memory_size": has_memory,
    "cpus": has_cpus,
    "disk_size": has_disk,
    "pool": in_pool,
}
PASSING: Final[dict[str, Filter]] = {
    "cordoned": is_open,
    "policy_not_ready": policy_ready,
    "memory_full": memory_left,
}


def dropped_by(beat: Heartbeat, state: NodeState, need: Need) -> tuple[str, bool] | None:
    """The filter that drops a node and whether that lasts; None if it passes."""
    for name, passes in LASTING.items():
        if not passes(beat, need):
            return name, True
    if state is not NodeState.LIVE:
        return state.value, False
    for name, passes in PASSING.items():
        if not passes(beat, need):
            return name, False
    return None
