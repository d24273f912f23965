"""The catalogue: which image a name@version stands for. A KV bucket, written by compare-and-set.

The version's key is created, never overwritten, so of two publishers one wins. The copy under the
name's newest key only ever moves to a higher version, except when that version is removed; if a
publisher dies between the two writes, the next claim of that layer completes them. Keys and the
order of versions are in `libdsec.wire.layer`, shared with whoever resolves.
"""

from __future__ import annotations

from libdsec.bus import Bus
from libdsec.errors import AlreadyExists, Conflict, InvalidArgument, NotFound, Unavailable
from libdsec.wire.ids import parse_layer_ref
from libdsec.wire.layer import (
    PUBLIC_SPACE,
    LayerInfo,
    LayerListing,
    LayerQuery,
    candidate_keys,
    is_newest_key,
    key_pattern,
    layer_key,
    newest_key,
    version_order,
)
from libdsec.wire.subjects import LAYERS

from ...chassis.kv import KeyValue
from ...chassis.kv_watch import scan

_ATTEMPTS = 64  # as many publishers may race for one name before one has to try again
_LISTING_BYTES = 768 << 10  # of a message's 1 MiB


class Catalogue:
    """Reads are for a project; what it may see is its own space and the public one."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._kv = KeyValue(bus, LAYERS)

    async def resolve(self, project: str, ref: str) -> LayerInfo:
        """Raises NotFound, InvalidArgument."""
        for key in candidate_keys(ref, project):
            entry = await self._kv.get(key)
            if entry is not None:
                return entry.value
        raise NotFound(
            f"no layer {ref!r} for project {project!r}",
            hint="`dsec layers list` shows what there is",
        )

    async def claim(self, layer: LayerInfo, version: str | None) -> LayerInfo:
        """Give the layer its name. Without a version it gets the next number, unless the newest
        version is this very layer: then the claim is a repeated one and is answered alike.

        Raises:
            AlreadyExists: name@version stands for another layer.
        """
        for _ in range(_ATTEMPTS):
            if version is None:
                newest = await self._kv.get(newest_key(layer.space, layer.name))
                if newest is not None and _same(newest.value, layer):
                    return newest.value
            wanted = version or await self._next_number(layer.space, layer.name)
            claimed = layer.model_copy(update={"version": wanted})
            try:
                await self._kv.create(layer_key(layer.space, layer.name, wanted), claimed)
            except AlreadyExists:
                if version is None:
                    continue  # somebody else took the number
                claimed = await self._claimed_before(claimed)
            await self._advance(claimed)
            return claimed
        raise Unavailable(f"{_ATTEMPTS} others are publishing {layer.name!r}", retry_after_s=1.0)

    async def remove(self, layer: LayerInfo) -> None:
        """Take the name away. The newest version is moved first: it must not point at nothing."""
        await self._retreat(layer)
        await self._kv.delete(layer_key(layer.space, layer.name, layer.version))
        await self._retreat(layer)

    async def listing(self, project: str, query: LayerQuery) -> LayerListing:
        """By name and version; what `limit` or a message's size cut off is counted."""
        found = [
            layer
            for pattern in _patterns(project, query.ref)
            for layer in await self._scan(pattern)
            if query.kind in (None, layer.kind)
        ]
        found.sort(key=lambda v: (v.space, v.name, version_order(v.version)))
        shown: list[LayerInfo] = []
        room = _LISTING_BYTES
        for layer in found[: max(query.limit, 0)]:
            room -= len(layer.encode())
            if room < 0:
                break
            shown.append(layer)
        return LayerListing(layers=tuple(shown), dropped=len(found) - len(shown))

    async def digests(self) -> frozenset[str]:
        """Every image that a name of any space stands for."""
        return frozenset(layer.digest for layer in await self._scan(">"))

    async def _claimed_before(self, layer: LayerInfo) -> LayerInfo:
        entry = await self._kv.get(layer_key(layer.space, layer.name, layer.version))
        if entry is not None and _same(entry.value, layer):
            return entry.value
        raise AlreadyExists(
            f"layer {layer.ref} exists and is another one",
            hint="versions never change: publish under a new one, or without any for the next",
        )

    async def _next_number(self, space: str, name: str) -> str:
        versions = [layer.version for layer in await self._scan(key_pattern(space, name))]
        numbers = [int(v) for v in versions if v.isascii() and v.isdigit()]
        return str(max(numbers, default=0) + 1)

    async def _advance(self, layer: LayerInfo) -> None:
        """Make it the newest version unless a higher one is."""
        key = newest_key(layer.space, layer.name)
        for _ in range(_ATTEMPTS):
            newest = await self._kv.get(key)
            try:
                if newest is None:
                    await self._kv.create(key, layer)
                elif version_order(newest.value.version) < version_order(layer.version):
                    await self._kv.update(key, layer, newest.revision)
                return
            except (AlreadyExists, Conflict):
                continue
        raise Unavailable(f"{_ATTEMPTS} others are publishing {layer.name!r}", retry_after_s=1.0)

    async def _retreat(self, layer: LayerInfo) -> None:
        """If it is the newest version, make the one below it the newest."""
        key = newest_key(layer.space, layer.name)
        for _ in range(_ATTEMPTS):
            newest = await self._kv.get(key)
            if newest is None or newest.value.version != layer.version:
                return
            versions = await self._scan(key_pattern(layer.space, layer.name))
            others = [other for other in versions if other.version != layer.version]
            try:
                if others:
                    best = max(others, key=lambda other: version_order(other.version))
                    await self._kv.update(key, best, newest.revision)
                else:
                    await self._kv.delete(key, revision=newest.revision)
                return
            except Conflict:
                continue
        raise Unavailable(f"{_ATTEMPTS} others are publishing {layer.name!r}", retry_after_s=1.0)

    async def _scan(self, pattern: str) -> list[LayerInfo]:
        found = await scan(self._bus, self._kv, pattern)
        return [layer for key, layer in found.items() if not is_newest_key(key)]


def _patterns(project: str, ref: str) -> list[str]:
    """What a listing covers: everything the project sees, a whole space, or a name's versions."""
    spaces = list(dict.fromkeys((project, PUBLIC_SPACE)))
    if not ref:
        return [key_pattern(space) for space in spaces]
    space, name, version = parse_layer_ref(ref)
    if version is not None:
        raise InvalidArgument(f"{ref!r} names one version", hint="list a name, or ask for its info")
    if space not in (None, *spaces):
        raise NotFound(f"project {project!r} does not see the layers of {space!r}")
    return [key_pattern(s, name) for s in spaces if space in (None, s)]


def _same(one: LayerInfo, other: LayerInfo) -> bool:
    """Whether a caller that wanted one has got it with the other."""
    return (one.digest, one.kind, one.config) == (other.digest, other.kind, other.config)
