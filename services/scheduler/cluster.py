"""The nodes as one scheduler sees them: the last view, its own overlay, refusals it remembers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from random import Random
from typing import Final

from libdsec.errors import ERRORS, DSecError, InvalidArgument, Unsupported
from libdsec.wire.defaults import SAMPLE_K
from libdsec.wire.error import ErrorReply
from libdsec.wire.node import NodeState, NodeView
from libdsec.wire.placement import OfferReply

from .filters import LASTING, Need
from .overlay import Overlay
from .placement import Choice, Eligible, Node, choose, eligible

REST_S: Final = 0.5  # a node that refused without naming a time is left alone this long
MAX_REST_S: Final = 5.0


class ClusterState:
    """`show` at every new view; the rest is what the protocol asks of a Cluster."""

    def __init__(
        self, *, clock: Callable[[], float], rng: Random | None = None, k: int = SAMPLE_K
    ) -> None:
        self.now = clock
        self.overlay = Overlay()
        self._rng = rng or Random()
        self._k = k
        self._nodes: dict[str, Node] = {}
        self._eligible: dict[tuple[object, ...], Eligible] = {}
        self._resting: dict[str, float] = {}
        self._sessions: dict[str, tuple[str, str]] = {}  # node → (as in the view, as it told us)

    def show(self, views: Iterable[NodeView]) -> None:
        """A new view replaces the old one."""
        now = self.now()
        self._nodes = {
            v.heartbeat.node: Node(v.heartbeat.node, v.heartbeat, v.state) for v in views
        }
        self._eligible.clear()
        self._resting = {name: t for name, t in self._resting.items() if t > now}
        for node in self._nodes.values():
            self.overlay.shown(node.name, node.beat, now)
            node.weigh(self.overlay.count(node.name))

    @property
    def utilisation(self) -> float:
        """Mean load of the healthy local nodes, the overlay included."""
        loads = [
            n.load
            for n in self._nodes.values()
            if n.state is NodeState.LIVE and n.beat.pool == "local"
        ]
        return sum(loads) / len(loads) if loads else 0.0

    # --- Cluster ---

    def objection(self, need: Need) -> DSecError | None:
        """Why no known node will ever take this. With no node known at all, it can only wait."""
        if not self._nodes or self._among(need).nodes or self._among(need).lasting:
            return None
        beats = [node.beat for node in self._nodes.values()]
        for name, passes in LASTING.items():
            if not any(passes(beat, need) for beat in beats):
                return _impossible(name, need, self._nodes)
        counts = ", ".join(f"{name} {n}" for name, n in self._among(need).dropped.items())
        return Unsupported(f"no node has all that is asked for; dropped by filter: {counts}")

    def choose(self, need: Need, count: int, exclude: Collection[str]) -> Choice:
        now = self.now()
        resting = [name for name, until in self._resting.items() if until > now]
        return choose(
            self._among(need),
            count,
            overlay=self.overlay,
            rng=self._rng,
            exclude=exclude,
            resting=resting,
            avoid=need.avoid,
            k=self._k,
        )

    def answered(self, node: str, asked: int, reply: OfferReply | None) -> None:
        now = self.now()
        accepted = None if reply is None else len(reply.accepted)
        seq, session = (reply.heartbeat_seq, reply.session) if reply else (0, "")
        self.overlay.answered(node, asked, accepted, seq, session, now)
        if reply is not None and reply.session != self.session(node):
            self._sessions[node] = (self._seen_session(node), reply.session)
        elif reply is not None and reply.refused is not None and _passes(reply.refused):
            rest_s = reply.refused.retry_after_s or REST_S
            self._resting[node] = now + min(rest_s, MAX_REST_S)
        if node in self._nodes:
            self._nodes[node].weigh(self.overlay.count(node))

    def session(self, node: str) -> str:
        """The edge's boot session: what it told us itself, until the view has a newer one."""
        seen = self._seen_session(node)
        as_of, told = self._sessions.get(node, (seen, seen))
        return told if as_of == seen else seen

    def names(self) -> frozenset[str]:
        return frozenset(n.name for n in self._nodes.values() if n.state is not NodeState.LOST)

    def lost(self, node: str) -> bool:
        """Declared lost; a node nobody has heard of since this scheduler started is not."""
        return node in self._nodes and self._nodes[node].state is NodeState.LOST

    def _seen_session(self, node: str) -> str:
        return self._nodes[node].beat.session if node in self._nodes else ""

    def _among(self, need: Need) -> Eligible:
        key = need.signature
        found = self._eligible.get(key)
        if found is None:
            found = self._eligible[key] = eligible(self._nodes, need)
        return found


def _passes(refusal: ErrorReply) -> bool:
    """Whether the node may say otherwise in a while, to anybody."""
    kind = ERRORS.get(refusal.code)
    return kind is not None and kind.retryable


def _impossible(name: str, need: Need, nodes: Mapping[str, Node]) -> DSecError:
    """The filter that no known node passes, in the caller's words."""
    beats = [node.beat for node in nodes.values()]
    resources = need.spec.resources
    match name:
        case "backend":
            known = sorted({b for beat in beats for b in beat.backends})
            return Unsupported(
                f"no node runs backend {need.spec.backend.value!r}",
                hint=f"there are: {', '.join(known) or 'none'}",
            )
        case "capability":
            lacking = [
                c for c in sorted(need.capabilities) if not any(c in b.capabilities for b in beats)
            ]
            return Unsupported(
                f"no node can enforce {', '.join(lacking) or 'all of it'}",
                hint="`dsec nodes --capabilities` says why not; leave it out of the policy",
            )
        case "memory_size":
            most = max(beat.memory_mib for beat in beats)
            return _too_much("memory_mib", resources.memory_mib, most)
        case "cpus":
            return _too_much("cpus", resources.cpus, max(beat.cpus for beat in beats))
        case "disk_size":
            return _too_much("disk_mib", resources.disk_mib, max(b.disk_mib for b in beats))
        case _:
            return Unsupported(f"no node is in pool {', '.join(sorted(need.pools))}")


def _too_much(name: str, value: float, most: float) -> InvalidArgument:
    return InvalidArgument(
        f"{name}={value:.9g} is more than any node has", hint=f"the most is {most:.9g}"
    )
