"""The layers mounted on this node: each digest once, however many sandboxes stack it.

Two mounts of one image share no page cache, so sandboxes share the mount. A layer is referenced by
the ids of the sandboxes that stack it; those ids and digests are in the edge's journal, and the
mounts outlive the edge in the node's pinned namespace, so a successor adopts both and mounts
nothing twice. A layer nobody references stays mounted for a grace time, because the next sandbox
of the same job is usually a moment away.

Not here: how an image is mounted (`libhost.layer`), where it comes from (`store`).
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from libdsec.errors import DataLoss, DSecError, Unavailable, Unsupported
from libdsec.wire.layer import ImageConfig, LayerInfo, ResolvedLayers
from libhost.aio import HostThreads
from libhost.layer import MountedLayer, mount_layer, mounted_layers, umount_layer
from libhost.paths import NodePaths

from ...chassis.clock import Clock
from ..tasks import Tasks
from .store import DamagedImageError, LayerStore

_log = structlog.get_logger("edge.layers")

_WAIT_S = 10.0  # how long an acquirer waits, besides the time to read the image
_READ_BYTES_PER_S = 50e6  # slower than any disk worth using
_HUNG_S = 3600.0  # a blocking call this old is given up; before that nobody starts a second one
_SWEEP_INTERVAL_S = 30.0


@dataclass(frozen=True)
class LayerStack:
    """What one sandbox's root is made of; valid until its id is released.

    `lowers` run from the bottom (base) to the top, as `libhost.overlay.plan_overlay` takes them;
    their descriptors belong to LayerMounts.
    """

    lowers: tuple[MountedLayer, ...]
    config: ImageConfig

    @property
    def digests(self) -> tuple[str, ...]:
        """What the edge journals, to hand it to `adopt` after a restart."""
        return tuple(layer.digest for layer in self.lowers)


class Mounter(Protocol):
    """The blocking calls; called in threads, at most one at a time per digest."""

    def mount(self, digest: str, image: Path) -> MountedLayer: ...

    def mounted(self) -> Mapping[str, MountedLayer]: ...

    def umount(self, layer: MountedLayer) -> None: ...


@dataclass(frozen=True)
class NodeMounter:
    """Mounts in the node's pinned namespace, which this process has entered."""

    paths: NodePaths

    def mount(self, digest: str, image: Path) -> MountedLayer:
        return mount_layer(self.paths, digest, image)

    def mounted(self) -> Mapping[str, MountedLayer]:
        return mounted_layers(self.paths)

    def umount(self, layer: MountedLayer) -> None:
        umount_layer(self.paths, layer)


@dataclass
class _Entry:
    """One digest. `work` is the mount or unmount under way; nobody starts a second one."""

    digest: str
    idle_since: float
    layer: MountedLayer | None = None
    users: set[str] = field(default_factory=set)
    work: asyncio.Task[DSecError | None] | None = None
    verified: bool = False


class LayerMounts:
    """adopt -> acquire, release (any number) -> close; what is mounted outlives this object."""

    def __init__(
        self,
        mounter: Mounter,
        store: LayerStore,
        threads: HostThreads,
        *,
        idle_grace_s: float = 600.0,
        clock: Clock,
    ) -> None:
        self._mounter = mounter
        self._store = store
        self._threads = threads
        self._idle_grace_s = idle_grace_s
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._held: dict[str, frozenset[str]] = {}
        self._tasks = Tasks()
        self.epoch = 0  # changes whenever the set of mounted layers does

    async def close(self) -> None:
        """Let the work under way finish; what is mounted stays for the successor."""
        await self._tasks.close(timeout_s=_WAIT_S)

    async def acquire(self, sandbox_id: str, resolved: ResolvedLayers) -> LayerStack:
        """Mount what is not mounted yet and reference all of it for `sandbox_id`. Idempotent.

        Raises:
            DataLoss: the store lacks a layer's image or it is damaged; the message names it.
            Unavailable: the image could not be read or mounted now.
            Unsupported: this host cannot mount an image from where the store keeps it.
        """
        wanted = _without_repeats(resolved.all)
        entries = [self._entry(info.digest) for info in wanted]
        new = self._hold(sandbox_id, entries)
        try:
            for info, entry in zip(wanted, entries, strict=True):
                if entry.layer is None:
                    self._start_mount(info, entry)
            for info, entry in zip(wanted, entries, strict=True):
                while entry.layer is None:
                    await self._mounted_by_someone(info, entry)
        except BaseException:
            self._drop(sandbox_id, new)
            raise
        lowers = tuple(entry.layer for entry in entries if entry.layer is not None)
        return LayerStack(lowers, resolved.config)

    async def release(self, sandbox_id: str) -> None:
        """Give up what `sandbox_id` references. Idempotent."""
        self._drop(sandbox_id, self._held.get(sandbox_id, frozenset()))

    async def adopt(self, held: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
        """Take over the mounts a predecessor left, referenced as its journal says.

        Returns the digests that are referenced but no longer mounted: their sandboxes live on,
        because a running overlay holds its layers by itself.
        """
        mounted = await self._threads.run(_WAIT_S, self._mounter.mounted)
        for digest, layer in mounted.items():
            entry = self._entry(digest)
            entry.layer = layer
            entry.idle_since = self._clock.monotonic_s()
        for sandbox_id, digests in held.items():
            self._hold(sandbox_id, [self._entry(digest) for digest in digests])
        self.epoch += 1
        return tuple(sorted(e.digest for e in self._entries.values() if e.layer is None))

    def users_of(self, digest: str) -> frozenset[str]:
        """The sandboxes of this node that stack the layer."""
        entry = self._entries.get(digest)
        return frozenset(entry.users) if entry else frozenset()

    @property
    def mounted(self) -> frozenset[str]:
        return frozenset(e.digest for e in self._entries.values() if e.layer is not None)

    async def run(self, memory_is_short: Callable[[], bool]) -> None:
        """Unmount what is idle for long, or at all while memory is short; the edge spawns this."""
        while True:
            await self._clock.sleep(_SWEEP_INTERVAL_S)
            await (self.trim() if memory_is_short() else self.sweep())

    async def sweep(self) -> int:
        """Unmount what has been idle for the grace time; returns how many."""
        return await self._unmount_idle(self._clock.monotonic_s() - self._idle_grace_s)

    async def trim(self) -> int:
        """Unmount everything idle, now: for a node under memory pressure."""
        return await self._unmount_idle(self._clock.monotonic_s())

    def _entry(self, digest: str) -> _Entry:
        return self._entries.setdefault(digest, _Entry(digest, self._clock.monotonic_s()))

    def _hold(self, sandbox_id: str, entries: list[_Entry]) -> frozenset[str]:
        """Reference the entries; returns the digests that the sandbox did not hold before."""
        for entry in entries:
            entry.users.add(sandbox_id)
        before = self._held.get(sandbox_id, frozenset())
        self._held[sandbox_id] = before.union(entry.digest for entry in entries)
        return self._held[sandbox_id] - before

    def _drop(self, sandbox_id: str, digests: frozenset[str]) -> None:
        for digest in digests:
            entry = self._entries[digest]
            entry.users.discard(sandbox_id)
            entry.idle_since = self._clock.monotonic_s()
        left = self._held.pop(sandbox_id, frozenset()) - digests
        if left:
            self._held[sandbox_id] = left

    def _start_mount(self, info: LayerInfo, entry: _Entry) -> asyncio.Task[DSecError | None]:
        if entry.work is None:
            entry.work = self._tasks.spawn(self._mount(info, entry), name=f"mount {info.ref}")
        return entry.work

    async def _mounted_by_someone(self, info: LayerInfo, entry: _Entry) -> None:
        """Wait for the work on an entry, which may be a mount or the unmount before it."""
        try:
            async with asyncio.timeout(_WAIT_S + info.size_bytes / _READ_BYTES_PER_S):
                failure = await asyncio.shield(self._start_mount(info, entry))
        except TimeoutError as err:
            raise _failure(info, err) from err
        if failure is not None:
            raise failure

    async def _mount(self, info: LayerInfo, entry: _Entry) -> DSecError | None:
        """A failure is returned: it belongs to those who wait for it, and there may be none."""
        try:
            entry.layer = await self._threads.run(_HUNG_S, self._mount_blocking, info, entry)
            self.epoch += 1
        except (OSError, TimeoutError, DamagedImageError) as err:
            return _failure(info, err)
        finally:
            entry.work = None
        return None

    def _mount_blocking(self, info: LayerInfo, entry: _Entry) -> MountedLayer:
        if not entry.verified:
            self._store.verify(info.digest, info.size_bytes)
            entry.verified = True
        return self._mounter.mount(info.digest, self._store.path(info.digest))

    async def _unmount_idle(self, idle_before: float) -> int:
        works = []
        for entry in list(self._entries.values()):
            if entry.users or entry.work is not None or entry.idle_since > idle_before:
                continue
            if entry.layer is None:
                del self._entries[entry.digest]
                continue
            unmount = self._unmount(entry, entry.layer)
            entry.work = self._tasks.spawn(unmount, name=f"unmount {entry.digest}")
            entry.layer = None
            works.append(entry.work)
        for work in works:
            await asyncio.shield(work)
        return len(works)

    async def _unmount(self, entry: _Entry, layer: MountedLayer) -> None:
        """A failure is not the next acquirer's: mounting finds and takes what is still there."""
        try:
            await self._threads.run(_HUNG_S, self._mounter.umount, layer)
            self.epoch += 1
        except (OSError, TimeoutError) as err:
            _log.warning("a layer could not be unmounted", digest=layer.digest, error=str(err))
        finally:
            entry.work = None


def _without_repeats(layers: tuple[LayerInfo, ...]) -> tuple[LayerInfo, ...]:
    """Each digest once, at its uppermost place: overlayfs refuses the same layer twice (ELOOP)."""
    last = {info.digest: index for index, info in enumerate(layers)}
    return tuple(info for index, info in enumerate(layers) if last[info.digest] == index)


def _failure(info: LayerInfo, err: Exception) -> DSecError:
    if isinstance(err, DamagedImageError):
        return DataLoss(
            f"layer {info.ref} is damaged in this node's store: {err.reason}",
            hint="publish it again: the same archive gives the same digest and replaces the image",
        )
    if isinstance(err, FileNotFoundError):
        return DataLoss(
            f"the image {info.digest} of layer {info.ref} is not in this node's store",
            hint="all nodes must see the store directory that the layer was published to",
        )
    if isinstance(err, OSError) and err.errno == errno.ENOTBLK:
        return Unsupported(
            f"layer {info.ref} cannot be mounted from the file system that the store is on",
            hint="put the layer store on ext4, xfs or a network mount; not on tmpfs or overlayfs",
        )
    return Unavailable(f"layer {info.ref} could not be mounted: {err}")
