"""Which nodes a request goes to: filter, sample k, take the least loaded, again for every item.

Pure but for the random numbers it is given. What passes the filters is worked out once per view
and kind of need; room and load change with every choice and are looked at for the sample alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

from libdsec.wire.defaults import SAMPLE_K
from libdsec.wire.node import Heartbeat, NodeState

from .filters import Need, dropped_by
from .overlay import Overlay

NOISE: Final = 0.02  # of a node's operating point; what free memory wanders by itself


@dataclass(frozen=True)
class Choice:
    """Items per node. If fewer than were asked for: how many nodes each filter dropped."""

    groups: Mapping[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    possible: bool = False  # some node could take one now
    open: int = 0  # nodes that are of the right kind and have not been asked yet


@dataclass
class Node:
    """A node of the present view, with its load as it is including the overlay."""

    name: str
    beat: Heartbeat
    state: NodeState
    load: float = 0.0
    work: float = 0.0  # creates in flight and sandboxes, as shares: what measuring cannot blur
    room: float = 0.0

    def weigh(self, placed: int) -> None:
        """Load and room if `placed` more sandboxes are there than the heartbeat shows."""
        beat, load = self.beat, self.beat.load
        sandboxes, creating = load.sandboxes, load.creating
        self.room = float("inf")
        if beat.max_sandboxes:
            sandboxes += placed / beat.max_sandboxes
            self.room = beat.max_sandboxes - beat.running - beat.paused - beat.creating - placed
        if beat.max_creating:
            creating += placed / beat.max_creating
        self.load = max(load.memory, load.ls_cpu, creating, sandboxes)
        self.work = creating + sandboxes


@dataclass
class Eligible:
    """What the filters leave of a view for one kind of need."""

    nodes: list[Node]
    dropped: Counter[str]
    lasting: int  # nodes that a passing filter dropped: of the right kind


def eligible(nodes: Mapping[str, Node], need: Need) -> Eligible:
    kept: list[Node] = []
    dropped: Counter[str] = Counter()
    lasting = 0
    for node in nodes.values():
        verdict = dropped_by(node.beat, node.state, need)
        if verdict is None:
            kept.append(node)
        else:
            dropped[verdict[0]] += 1
            lasting += not verdict[1]
    return Eligible(kept, dropped, lasting)


def choose(
    among: Eligible,
    count: int,
    *,
    overlay: Overlay,
    rng: Random,
    exclude: Collection[str] = (),
    resting: Collection[str] = (),  # nodes that have refused a moment ago
    avoid: Collection[str] = (),
    k: int = SAMPLE_K,
) -> Choice:
    """Spread `count` items; each counts as load for the next."""
    dropped = Counter(among.dropped)
    pool = []
    opened = among.lasting
    for node in among.nodes:
        if node.name in exclude:
            dropped["asked_already"] += 1
            continue
        opened += 1
        if node.name in resting:
            dropped["refused_lately"] += 1
        elif node.room < 1:
            dropped["full"] += 1
        else:
            pool.append(node)
    preferred = [node for node in pool if node.name not in avoid]
    pool = preferred or pool
    possible = bool(pool)
    groups: Counter[str] = Counter()
    for _ in range(count):
        if not pool:
            break
        node = _least_loaded(pool, rng, k)
        groups[node.name] += 1
        overlay.add(node.name, 1)
        node.weigh(overlay.count(node.name))
        if node.room < 1:
            pool.remove(node)
            dropped["full"] += 1
    return Choice(groups, dict(dropped), possible, opened)


def _least_loaded(pool: list[Node], rng: Random, k: int) -> Node:
    """Of k samples the least loaded. Loads closer than NOISE are equal, and then what counts is
    the work that was given out: a memory reading that differs by a thousandth must not send a
    whole burst to one of two idle nodes."""
    if len(pool) > k:  # with replacement: as good for k much smaller than the pool
        pool = [pool[int(rng.random() * len(pool))] for _ in range(k)]
    best = pool[0]
    for other in pool[1:]:
        gap = other.load - best.load
        if gap < -NOISE or (gap <= NOISE and other.work < best.work):
            best = other
    return best
