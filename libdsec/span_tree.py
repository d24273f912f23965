"""A request's spans, gathered from wherever they were recorded, as a tree with times.

Pure. Clocks of different hosts differ, so what is compared is compared as recorded; a span whose
parent nobody has kept hangs below the root of its trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .wire.trace import SpanRecord


@dataclass
class Node:
    """A span and what happened below it, in the order in which it began."""

    span: SpanRecord
    children: list[Node] = field(default_factory=list)
    orphan: bool = False  # its own parent is not known

    @property
    def duration_ms(self) -> float:
        return (self.span.end_ns - self.span.start_ns) / 1e6

    def descendants(self) -> Iterator[Node]:
        for child in self.children:
            yield child
            yield from child.descendants()

    @property
    def uncovered_ms(self) -> float:
        """How much of this span's time no descendant covers."""
        begin, end = self.span.start_ns, self.span.end_ns
        parts = sorted(
            (max(node.span.start_ns, begin), min(node.span.end_ns, end))
            for node in self.descendants()
        )
        covered, upto = 0, begin
        for start, stop in parts:
            covered += max(0, stop - max(start, upto))
            upto = max(upto, stop)
        return (end - begin - covered) / 1e6

    @property
    def uncovered_share(self) -> float:
        return self.uncovered_ms / self.duration_ms if self.duration_ms > 0 else 0.0


@dataclass(frozen=True)
class Trace:
    """What is known of a request: one tree per trace it appears in.

    Attributes:
        dropped: spans that the answering processes have forgotten so far, of any request.
    """

    request_id: str
    spans: tuple[SpanRecord, ...]
    sources: tuple[str, ...]
    dropped: int

    @property
    def roots(self) -> tuple[Node, ...]:
        by_trace: dict[str, list[SpanRecord]] = {}
        for span in self.spans:
            by_trace.setdefault(span.trace_id, []).append(span)
        return tuple(grow(spans) for spans in by_trace.values())


def grow(spans: Sequence[SpanRecord]) -> Node:
    """One trace's spans as a tree below its root."""
    nodes = {span.span_id: Node(span) for span in spans}
    ordered = sorted(nodes.values(), key=lambda node: (node.span.start_ns, node.span.end_ns))
    tops = [node for node in ordered if node.span.parent_id not in nodes]
    # The caller's own span is the root, even where another host's clock began before it.
    root = min(tops, key=lambda node: (bool(node.span.parent_id), node.span.start_ns))
    for node in ordered:
        if node is root:
            continue
        parent = nodes.get(node.span.parent_id)
        node.orphan = parent is None
        (parent or root).children.append(node)
    return root


def merge(answers: Iterable[Iterable[SpanRecord]]) -> tuple[SpanRecord, ...]:
    """Every span once, the oldest first."""
    found = {span.span_id: span for spans in answers for span in spans}
    return tuple(sorted(found.values(), key=lambda span: span.start_ns))
