"""What a spec's layer names mean: the catalogue, with the versions seen lately in memory.

A version never changes once published, so it is remembered, at most CACHED of them and for a
minute (a removed layer is refused by the edges anyway); that there is none, for a second. "Newest"
is read each time: whoever has just published a version and asks for the newest gets that one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from libdsec.bus import Bus
from libdsec.errors import DSecError, NotFound
from libdsec.wire import subjects
from libdsec.wire.ids import parse_layer_ref
from libdsec.wire.layer import (
    PUBLIC_SPACE,
    LayerInfo,
    ResolvedLayers,
    candidate_keys,
    is_newest_key,
    key_pattern,
)
from libdsec.wire.sandbox import SandboxSpec

from ..chassis.kv import KeyValue
from ..chassis.kv_watch import scan

CACHED: Final = 10_000
_REMEMBER_S: Final = 60.0
_ABSENT_S: Final = 1.0
_LISTED: Final = 10  # of what exists, in a hint
_LISTS: Final = 64
_LIST_REMEMBER_S: Final = 5.0

T = TypeVar("T")


class Layers:
    """resolve() turns names into digests."""

    def __init__(self, bus: Bus, monotonic: Callable[[], float]) -> None:
        self._bus = bus
        self._kv: KeyValue[LayerInfo] = KeyValue(bus, subjects.LAYERS)
        self._monotonic = monotonic
        self._cache: OrderedDict[str, tuple[LayerInfo | None, float]] = OrderedDict()
        self._lists: OrderedDict[str, tuple[frozenset[str], float]] = OrderedDict()

    async def resolve(
        self, project: str, spec: SandboxSpec, pinned: tuple[str, ...] = ()
    ) -> ResolvedLayers | DSecError:
        """NotFound, naming what exists, or InvalidArgument is given back, not raised.

        Raises:
            Unavailable, DeadlineExceeded: the catalogue does not answer.
        """
        names = [spec.image, *([spec.workspace] if spec.workspace else []), *spec.toolkits]
        refs = list(pinned) if len(pinned) == len(names) else names
        try:
            layers = await _all([self._find(project, ref) for ref in refs])
        except DSecError as err:
            if err.retryable or err.infrastructure:
                raise
            return err
        base, *others = layers
        workspace = others.pop(0) if spec.workspace else None
        return ResolvedLayers(base=base, workspace=workspace, toolkits=tuple(others))

    async def _find(self, project: str, ref: str) -> LayerInfo:
        keys = candidate_keys(ref, project)
        found = {key: known[0] for key in keys if (known := self._known(key)) is not None}
        unknown = [key for key in keys if key not in found]
        found |= dict(zip(unknown, await _all([self._read(key) for key in unknown]), strict=True))
        for key in keys:
            layer = found[key]
            if layer is not None:
                return layer
        raise await self._missing(project, ref)

    def _known(self, key: str) -> tuple[LayerInfo | None, float] | None:
        known = self._cache.get(key)
        return known if known is not None and known[1] > self._monotonic() else None

    async def _read(self, key: str) -> LayerInfo | None:
        entry = await self._kv.get(key)
        layer = entry.value if entry is not None else None
        if not is_newest_key(key):
            keep_s = _REMEMBER_S if layer is not None else _ABSENT_S
            self._cache[key] = layer, self._monotonic() + keep_s
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return layer

    async def _missing(self, project: str, ref: str) -> NotFound:
        """Names the versions that there are of the name, or else the names that there are."""
        space, name, _ = parse_layer_ref(ref)
        spaces = dict.fromkeys((project, PUBLIC_SPACE) if space is None else (space,))
        for patterns in ([key_pattern(s, name) for s in spaces], [f"{s}.>" for s in spaces]):
            refs = {ref for pattern in patterns for ref in await self._listed(pattern)}
            if refs:
                shown = ", ".join(sorted(refs)[:_LISTED])
                more = f" and {len(refs) - _LISTED} more" if len(refs) > _LISTED else ""
                return NotFound(f"there is no layer {ref!r}", hint=f"there are {shown}{more}")
        return NotFound(f"there is no layer {ref!r}", hint="none has been published")

    async def _listed(self, pattern: str) -> frozenset[str]:
        """References below a pattern, remembered for a moment: listing a large space is dear."""
        found = self._lists.get(pattern)
        if found is None or found[1] < self._monotonic():
            layers = await scan(self._bus, self._kv, pattern)
            refs = frozenset(v.ref for k, v in layers.items() if not is_newest_key(k))
            found = self._lists[pattern] = refs, self._monotonic() + _LIST_REMEMBER_S
            while len(self._lists) > _LISTS:
                self._lists.popitem(last=False)
        return found[0]


async def _all(work: Sequence[Awaitable[T]]) -> list[T]:
    """At the same time; the usual single one, without a task."""
    return [await one for one in work] if len(work) < 2 else await asyncio.gather(*work)
