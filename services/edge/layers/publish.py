"""The verbs of the `layers` subjects, on an edge that may publish.

    begin   the edge that answers is the one that receives: its node is in the reply
    chunk   to that edge
    commit  check -> build -> store -> claim the name; repeated, it joins or gives the same answer
    list, info, remove

A commit's work goes on when its caller gives up: the archive is here, and the answer is kept for
whoever asks again. The name is claimed last, after fsck and digest, so a half-built layer has none.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import structlog

from libdsec.bus import Call
from libdsec.errors import Conflict, DSecError, InvalidArgument, PermissionDenied
from libdsec.wire.ids import parse_layer_ref
from libdsec.wire.layer import (
    PUBLIC_SPACE,
    LayerInfo,
    LayerListing,
    LayerQuery,
    PublishBegin,
    PublishChunk,
    PublishCommit,
    PublishProgress,
    PublishStarted,
)
from libhost.aio import HostThreads

from ...chassis.clock import Clock
from ..tasks import Tasks
from .build import BuildLimits, build_layer
from .catalogue import Catalogue
from .failure import disk_failure
from .mounts import LayerMounts
from .store import LayerStore, StoredImage
from .uploads import Upload, Uploads

_log = structlog.get_logger("edge.layers")

_CONFIG_BYTES = 16 << 10  # it travels in every offer
_STORE_TIMEOUT_S = 60.0
_BUILD_STEPS = 6
_DRAIN_S = 10.0


@dataclass(frozen=True)
class PublishPolicy:
    """Who may publish to the public space, and how long an unnamed image is kept.

    Whose subject says `public` has been let in under that name by the server.
    """

    public_publishers: frozenset[str] = frozenset({PUBLIC_SPACE})
    grace_s: float = 48 * 3600.0
    builds_at_once: int = 2
    collect_every_s: float = 3600.0


class Publisher:
    """begin -> chunk (any number) -> commit, for many callers at once; close at the end."""

    def __init__(
        self,
        node: str,
        catalogue: Catalogue,
        store: LayerStore,
        uploads: Uploads,
        mounts: LayerMounts,
        threads: HostThreads,
        *,
        policy: PublishPolicy,
        limits: BuildLimits,
        clock: Clock,
    ) -> None:
        self._node = node
        self._catalogue = catalogue
        self._store = store
        self._uploads = uploads
        self._mounts = mounts
        self._threads = threads
        self._policy = policy
        self._limits = limits
        self._builds = asyncio.Semaphore(policy.builds_at_once)
        self._tasks = Tasks()
        self._clock = clock

    async def close(self) -> None:
        """Give the layers that are being built a moment; their callers have to publish again."""
        await self._tasks.close(timeout_s=_DRAIN_S)

    async def begin(self, request: PublishBegin, call: Call) -> PublishStarted:
        space, name, version = parse_layer_ref(request.name)
        if space is not None or version is not None:
            raise InvalidArgument(f"{request.name!r} is not a layer's name alone")
        if request.version is not None:
            parse_layer_ref(f"{request.name}@{request.version}")
        if len(request.config.encode()) > _CONFIG_BYTES:
            raise InvalidArgument(f"the config of layer {name} has more than {_CONFIG_BYTES} bytes")
        self._check_space(_space(request, call.project), call.project)
        upload = self._uploads.begin(call.project, request)
        limits = self._uploads.limits
        return PublishStarted(
            node=self._node,
            upload_id=upload.upload_id,
            chunk_bytes=limits.max_chunk_bytes,
            expires_s=limits.idle_s,
        )

    async def chunk(self, request: PublishChunk, call: Call) -> PublishProgress:
        return PublishProgress(received=await self._uploads.write(call.project, request))

    async def commit(self, request: PublishCommit, call: Call) -> LayerInfo:
        upload = self._uploads.get(call.project, request.upload_id)
        if upload.work is None:
            upload.commit = request
            work = self._outcome(upload)
            upload.work = self._tasks.spawn(work, name=f"publish {upload.begin.name}")
        elif upload.commit != request:
            raise Conflict(f"upload {upload.upload_id} was committed with another size or digest")
        outcome = await asyncio.shield(upload.work)
        if isinstance(outcome, DSecError):
            raise outcome
        return outcome

    async def listing(self, request: LayerQuery, call: Call) -> LayerListing:
        return await self._catalogue.listing(call.project, request)

    async def info(self, request: LayerQuery, call: Call) -> LayerInfo:
        return await self._catalogue.resolve(call.project, request.ref)

    async def remove(self, request: LayerQuery, call: Call) -> LayerInfo:
        if parse_layer_ref(request.ref)[2] is None:
            raise InvalidArgument(f"say which version of {request.ref!r} to remove: name@version")
        layer = await self._catalogue.resolve(call.project, request.ref)
        self._check_space(layer.space, call.project)
        if users := self._mounts.users_of(layer.digest):
            raise Conflict(
                f"layer {layer.ref} is in use by {len(users)} sandboxes of {self._node}, "
                f"{min(users)} among them",
                hint="stop them first",
            )
        await self._catalogue.remove(layer)
        if layer.digest not in await self._catalogue.digests():
            await self._threads.run(_STORE_TIMEOUT_S, self._store.doom, layer.digest)
        return layer

    async def run(self) -> None:
        """Forget idle uploads and collect unnamed images, for ever; the edge spawns this."""
        due = self._clock.monotonic_s() + self._policy.collect_every_s
        while True:
            await self._clock.sleep(min(self._uploads.limits.idle_s, self._policy.collect_every_s))
            self._uploads.expire()
            if self._clock.monotonic_s() >= due:
                await self._collect_if_possible()
                due = self._clock.monotonic_s() + self._policy.collect_every_s

    async def _collect_if_possible(self) -> None:
        """The bus or the store may be away: then what is doomed waits for the next time."""
        try:
            await self.collect()
        except (DSecError, OSError) as err:
            _log.warning("no images were collected", error=str(err))

    async def collect(self) -> int:
        """Delete images that no name has stood for during the grace time and nobody here uses."""
        run, grace_s = self._threads.run, self._policy.grace_s
        doomed = await run(_STORE_TIMEOUT_S, self._store.doomed, grace_s)
        if not doomed:
            return 0
        named = await self._catalogue.digests()
        deleted = 0
        for digest in doomed:
            if digest in named:
                await run(_STORE_TIMEOUT_S, self._store.keep, digest)
            elif not self._mounts.users_of(digest):
                deleted += await run(_STORE_TIMEOUT_S, self._store.delete, digest, grace_s)
        return deleted

    async def _outcome(self, upload: Upload) -> LayerInfo | DSecError:
        """A failure is an answer too: it is kept for whoever asks again."""
        try:
            return await self._publish(upload)
        except DSecError as err:
            return err
        except OSError as err:
            return disk_failure(err)

    async def _publish(self, upload: Upload) -> LayerInfo:
        request = upload.begin
        try:
            async with self._builds:
                archive = await self._uploads.check(upload)
                timeout_s = _BUILD_STEPS * self._limits.step_timeout_s
                stored, files = await self._threads.run(timeout_s, self._build, archive, request)
        finally:
            self._uploads.discard_spool(upload)
        layer = LayerInfo(
            space=_space(request, upload.project),
            name=request.name,
            version=request.version or "",
            digest=stored.digest,
            kind=request.kind,
            size_bytes=stored.size_bytes,
            files=files,
            created_at=self._clock.wall_s(),
            config=request.config,
        )
        claimed = await self._catalogue.claim(layer, request.version)
        await self._threads.run(_STORE_TIMEOUT_S, self._store.keep, claimed.digest)
        return claimed

    def _build(self, archive: Path, request: PublishBegin) -> tuple[StoredImage, int]:
        with self._store.staging() as work:
            built = build_layer(archive, work, request.kind, self._limits)
            return self._store.put(built.path), built.files

    def _check_space(self, space: str, project: str) -> None:
        if space == PUBLIC_SPACE and project not in self._policy.public_publishers:
            raise PermissionDenied(
                f"project {project!r} may not change the layers of {PUBLIC_SPACE!r}",
                hint="an operator lists the projects that may",
            )


def _space(request: PublishBegin, project: str) -> str:
    return PUBLIC_SPACE if request.public else project
