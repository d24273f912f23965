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
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from libdsec.errors import DataLoss, DSecError, Unavailable, Unsupported
from libdsec.wire.layer import ImageConfig, LayerInfo, ResolvedLayers
from libhost.aio import HostThreads
from libhost.layer import MountedLayer, mount_layer, mounted_layers, umount_layer
from libhost.paths import NodePaths

from .store import LayerStore

_MOUNT_TIMEOUT_S = 10.0
_VERIFY_BYTES_PER_S = 50e6  # slower than any disk worth using; bounds a hung read
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
    layer: MountedLayer | None = None
    users: set[str] = field(default_factory=set)
    work: asyncio.Task[DSecError | None] | None = None
    idle_since: float = 0.0


class LayerMounts:
    """`async with LayerMounts(...)` -> adopt -> acquire, release; mounts survive the exit."""

    def __init__(
        self,
        mounter: Mounter,
        store: LayerStore,
        threads: HostThreads,
        *,
        idle_grace_s: float = 600.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mounter = mounter
        self._store = store
        self._threads = threads
        self._idle_grace_s = idle_grace_s
        self._monotonic = monotonic
        self._entries: dict[str, _Entry] = {}
        self._held: dict[str, frozenset[str]] = {}
        self._verified: set[str] = set()
        self._tasks: asyncio.TaskGroup
        self.epoch = 0  # changes whenever the set of mounted layers does

    async def acquire(self, sandbox_id: str, resolved: ResolvedLayers) -> LayerStack:
        """Mount what is not mounted yet and reference all of it for `sandbox_id`. Idempotent.

        Raises:
            DataLoss: the store lacks a layer's image or it is damaged; the message names it.
            Unavailable: the image could not be read or mounted now.
            Unsupported: this host cannot mount an image from where the store keeps it.
        """
        raise NotImplementedError

    async def release(self, sandbox_id: str) -> None:
        """Give up what `sandbox_id` references. Idempotent."""
        raise NotImplementedError

    async def adopt(self, held: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
        """Take over the mounts a predecessor left, referenced as its journal says.

        Returns the digests that are referenced but no longer mounted: their sandboxes live on,
        because a running overlay holds its layers by itself.
        """
        raise NotImplementedError

    def users_of(self, digest: str) -> frozenset[str]:
        """The sandboxes of this node that stack the layer."""
        raise NotImplementedError

    async def sweep(self) -> int:
        """Unmount what has been idle for the grace time; returns how many."""
        raise NotImplementedError

    async def trim(self) -> int:
        """Unmount everything idle, now: for a node under memory pressure."""
        raise NotImplementedError
