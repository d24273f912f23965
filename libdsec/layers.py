"""Layers from a caller's side: publish, list, look at, remove.

A caller needs no root and no access to the store: an archive goes, chunk by chunk over the bulk
connection, to an edge that publishes; that edge checks it, builds the layer and claims the name.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .archive import Owner, archive_size, opened
from .bounded import BoundedList
from .callback import Callback, notify
from .connection import Connection
from .errors import DataLoss, InvalidArgument, Unsupported
from .operation import Operation
from .spec import check_environment
from .wire.ids import parse_layer_ref
from .wire.layer import (
    ImageConfig,
    LayerInfo,
    LayerKind,
    LayerQuery,
    PublishBegin,
    PublishChunk,
    PublishCommit,
    PublishStarted,
)
from .wire.subjects import (
    LAYER_BEGIN,
    LAYER_CHUNK,
    LAYER_COMMIT,
    LAYER_INFO,
    LAYER_LIST,
    LAYER_REMOVE,
)

ROOT_OWNER: Owner = (0, 0)

_COMMIT_S = 1800.0  # building a large layer takes the edge a while
_MAX_CHUNK = 512 << 10  # as base64 it still fits a message


@dataclass(frozen=True)
class Upload:
    """How far a publish is; `total_bytes` is None while a directory is packed on the fly."""

    sent_bytes: int
    total_bytes: int | None
    node: str


class Layers:
    """The layers that this client's project may use: its own and the public ones."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def publish(
        self,
        source: str | Path,
        name: str,
        kind: LayerKind | str,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        owner: Owner | None = ROOT_OWNER,
        public: bool = False,
        on_progress: Callback[Upload] | None = None,
    ) -> LayerInfo:
        """Make a layer of a directory or a tar archive.

        Args:
            name: `name` or `name@version`; without a version it gets the next number.
            kind: "base", "workspace", "toolkit" or "diff".
            env, user, workdir: what processes in a sandbox of this base start with.
            owner: uid and gid of what a directory holds; None keeps what is on disk.
            public: for every project.

        Raises:
            AlreadyExists: the version is there; layers never change.
            InvalidArgument: the source can be no layer.
        """
        path = Path(source)
        with self._connection.operation("layers.publish") as op:
            if not path.exists():
                raise InvalidArgument(f"there is nothing at {path}", hint="a directory or a tar")
            config = ImageConfig(env=check_environment(env or {}), user=user, workdir=workdir)
            begin = _begin(name, kind, config, archive_size(path), public)
            started = await self._connection.call(LAYER_BEGIN, begin, op=op)
            op.node = started.node
            size, sha256 = await self._send(op, path, owner, started, begin, on_progress)
            commit = PublishCommit(upload_id=started.upload_id, size_bytes=size, sha256=sha256)
            return await self._connection.call(
                LAYER_COMMIT, commit, op=op, node=started.node, budget_s=_COMMIT_S
            )

    async def list(
        self, *, kind: LayerKind | str | None = None, limit: int = 1000
    ) -> BoundedList[LayerInfo]:
        """What can be used, by name."""
        with self._connection.operation("layers.list") as op:
            query = LayerQuery(kind=_kind(kind) if kind else None, limit=limit)
            listing = await self._connection.call(LAYER_LIST, query, op=op, idempotent=True)
        return BoundedList(listing.layers, listing.dropped)

    async def info(self, ref: str) -> LayerInfo:
        """One layer; without a version its newest.

        Raises:
            NotFound: there is none of that name.
        """
        with self._connection.operation("layers.info") as op:
            parse_layer_ref(ref)
            return await self._connection.call(
                LAYER_INFO, LayerQuery(ref=ref), op=op, idempotent=True
            )

    async def remove(self, ref: str) -> LayerInfo:
        """Take the name away. The image stays for a while, for sandboxes of other nodes.

        Raises:
            InvalidArgument: the version is not said: removing "the newest" is a race.
            Conflict: sandboxes of the node that answers use it.
        """
        with self._connection.operation("layers.remove") as op:
            if parse_layer_ref(ref)[2] is None:
                raise InvalidArgument(f"{ref!r} does not say which version", hint="name@version")
            return await self._connection.call(LAYER_REMOVE, LayerQuery(ref=ref), op=op)

    async def import_oci(self, ref: str, name: str) -> LayerInfo:
        """Make a base layer of an OCI image."""
        hint = "unpack the image's file system into a directory and publish that"
        err = Unsupported(f"importing {ref} is not built yet", hint=hint)
        self._connection.refuse("layers.import_oci", err)

    async def _send(
        self,
        op: Operation,
        source: Path,
        owner: Owner | None,
        started: PublishStarted,
        begin: PublishBegin,
        on_progress: Callback[Upload] | None,
    ) -> tuple[int, str]:
        digest, sent = hashlib.sha256(), 0
        chunk_bytes = min(started.chunk_bytes, _MAX_CHUNK)
        async with opened(source, owner) as read:
            while data := await asyncio.to_thread(read, chunk_bytes):
                chunk = PublishChunk(upload_id=started.upload_id, offset=sent, data=data)
                taken = await self._connection.call(
                    LAYER_CHUNK, chunk, op=op, node=started.node, bulk=True, idempotent=True
                )
                digest.update(data)
                sent += len(data)
                if taken.received != sent:
                    raise DataLoss(f"{started.node} has {taken.received} of {sent} bytes sent")
                await notify(on_progress, Upload(sent, begin.size_bytes, started.node))
        return sent, digest.hexdigest()


def _begin(
    name: str, kind: LayerKind | str, config: ImageConfig, size: int | None, public: bool
) -> PublishBegin:
    space, plain, version = parse_layer_ref(name)
    if space is not None:
        raise InvalidArgument(
            f"{name!r} names a space", hint="a layer is published into one's own project"
        )
    return PublishBegin(
        name=plain, version=version, kind=_kind(kind), config=config, size_bytes=size, public=public
    )


def _kind(kind: LayerKind | str) -> LayerKind:
    try:
        return LayerKind(kind)
    except ValueError:
        raise InvalidArgument(
            f"unknown kind {kind!r}", hint=f"it is one of {', '.join(LayerKind)}"
        ) from None
