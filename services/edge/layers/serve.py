"""Puts a node's layers together and, where the operator wants it, offers to publish."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libdsec.bus import Bus
from libdsec.wire import subjects
from libhost.aio import HostThreads
from libhost.memory import read_pressure
from libhost.paths import NodePaths

from ...chassis.service import Service
from .build import BuildLimits
from .catalogue import Catalogue
from .mounts import LayerMounts, NodeMounter
from .publish import Publisher, PublishPolicy
from .store import DirectoryStore
from .uploads import UploadLimits, Uploads

_CHUNKS_AT_ONCE = 64
_COMMITS_AT_ONCE = 16
_COMMIT_S = 600.0
_MEMORY_PRESSURE = Path("/proc/pressure/memory")
_SHORT_PERCENT = 10.0  # of the last ten seconds


@dataclass(frozen=True)
class LayerOptions:
    """`store` may be shared by several nodes; `publish` makes this edge one that builds."""

    store: Path
    publish: bool = False
    idle_grace_s: float = 600.0
    policy: PublishPolicy = field(default_factory=PublishPolicy)
    uploads: UploadLimits = field(default_factory=UploadLimits)
    build: BuildLimits = field(default_factory=BuildLimits)


async def open_layers(
    service: Service[Any],
    options: LayerOptions,
    paths: NodePaths,
    threads: HostThreads,
    held: Mapping[str, Iterable[str]],
) -> LayerMounts:
    """The node's layers, with those adopted that `held` (sandbox id -> digests) stacks.

    Call it after the node's mount namespace has been entered. Everything it starts ends with the
    service.
    """
    store = DirectoryStore(options.store, service.clock)
    mounts = LayerMounts(
        NodeMounter(paths),
        store,
        threads,
        idle_grace_s=options.idle_grace_s,
        clock=service.clock,
    )
    service.stack.push_async_callback(mounts.close)
    if lost := await mounts.adopt(held):
        service.log.warning("layers in use are not mounted any more", digests=lost)
    service.spawn(mounts.run(memory_is_short), name="layers-sweep")
    if options.publish:
        await _offer_to_publish(service, options, paths, store, mounts)
    return mounts


def memory_is_short() -> bool:
    """Whether tasks of this host stand waiting for memory; False where the kernel does not say."""
    try:
        return read_pressure(_MEMORY_PRESSURE).some_avg10 > _SHORT_PERCENT
    except OSError:
        return False


async def _offer_to_publish(
    service: Service[Any],
    options: LayerOptions,
    paths: NodePaths,
    store: DirectoryStore,
    mounts: LayerMounts,
) -> None:
    # Threads of its own: a build must not take the slots that sandboxes start in.
    building = HostThreads(options.policy.builds_at_once + 2)
    service.stack.callback(building.close)
    spool = paths.state_dir / "uploads"
    publisher = Publisher(
        paths.node,
        Catalogue(service.bus),
        store,
        Uploads(spool, building, options.uploads, service.clock),
        mounts,
        building,
        policy=options.policy,
        limits=options.build,
        clock=service.clock,
    )
    service.stack.push_async_callback(publisher.close)
    await _serve(service.bus, publisher, paths.node)
    service.spawn(publisher.run(), name="layers-publisher")


async def _serve(bus: Bus, publisher: Publisher, node: str) -> None:
    """What any publishing edge may answer, and what only the one that has the upload can."""
    await bus.serve(subjects.LAYER_BEGIN, publisher.begin, queue=subjects.Q_LAYERS)
    await bus.serve(subjects.LAYER_LIST, publisher.listing, queue=subjects.Q_LAYERS)
    await bus.serve(subjects.LAYER_INFO, publisher.info, queue=subjects.Q_LAYERS)
    await bus.serve(subjects.LAYER_REMOVE, publisher.remove, queue=subjects.Q_LAYERS)
    await bus.serve(subjects.LAYER_CHUNK, publisher.chunk, node=node, concurrency=_CHUNKS_AT_ONCE)
    await bus.serve(
        subjects.LAYER_COMMIT,
        publisher.commit,
        node=node,
        concurrency=_COMMITS_AT_ONCE,
        default_budget_s=_COMMIT_S,
    )
