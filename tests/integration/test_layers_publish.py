"""Publishing over real NATS, with real tools and a real store: from a caller's bytes to a name."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec.bus import Bus
from libdsec.errors import (
    AlreadyExists,
    Conflict,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
)
from libdsec.wire import subjects
from libdsec.wire.layer import (
    ImageConfig,
    LayerInfo,
    LayerKind,
    LayerQuery,
    PublishBegin,
    PublishChunk,
    PublishCommit,
    PublishStarted,
    ResolvedLayers,
)
from libhost.aio import HostThreads
from libhost.layer import mounted_layers
from libhost.paths import NodePaths
from services.chassis.clock import Clock
from services.chassis.topology import ensure_topology
from services.edge.layers.build import BuildLimits
from services.edge.layers.catalogue import Catalogue
from services.edge.layers.mounts import LayerMounts, NodeMounter
from services.edge.layers.publish import Publisher, PublishPolicy
from services.edge.layers.store import DirectoryStore
from services.edge.layers.uploads import UploadLimits, Uploads

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="owners and mounts need root"),
    pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed"),
]

NODE = "n1"


class PublishingNode:
    """What an edge puts together for its layers, without the rest of an edge."""

    def __init__(self, bus: Bus, directory: Path) -> None:
        clock = Clock()
        self.bus = bus
        self.paths = NodePaths(NODE, directory / "state", directory / "run")
        self.threads = HostThreads(4)
        self.store = DirectoryStore(directory / "store", clock)
        self.mounts = LayerMounts(NodeMounter(self.paths), self.store, self.threads, clock=clock)
        self.spool = directory / "spool"
        self.publisher = Publisher(
            NODE,
            Catalogue(bus),
            self.store,
            Uploads(self.spool, self.threads, UploadLimits(max_uploads=4), clock),
            self.mounts,
            self.threads,
            policy=PublishPolicy(public_publishers=frozenset({"ops"}), grace_s=0.0),
            limits=BuildLimits(),
            clock=clock,
        )

    async def serve(self) -> None:
        serve, publisher = self.bus.serve, self.publisher
        await serve(subjects.LAYER_BEGIN, publisher.begin, queue=subjects.Q_LAYERS)
        await serve(subjects.LAYER_LIST, publisher.listing, queue=subjects.Q_LAYERS)
        await serve(subjects.LAYER_INFO, publisher.info, queue=subjects.Q_LAYERS)
        await serve(subjects.LAYER_REMOVE, publisher.remove, queue=subjects.Q_LAYERS)
        await serve(subjects.LAYER_CHUNK, publisher.chunk, node=NODE)
        await serve(subjects.LAYER_COMMIT, publisher.commit, node=NODE)

    async def close(self) -> None:
        await self.publisher.close()
        for sandbox in {s for digest in self.mounts.mounted for s in self.mounts.users_of(digest)}:
            await self.mounts.release(sandbox)
        await self.mounts.trim()
        await self.mounts.close()
        self.threads.close()
        assert not mounted_layers(self.paths)


class Caller:
    """A client of one project, as bare as can be."""

    def __init__(self, bus: Bus, project: str) -> None:
        self.bus = bus
        self.project = project

    async def begin(self, name: str = "tool", **fields: object) -> PublishStarted:
        request = PublishBegin(name=name, **{"kind": LayerKind.TOOLKIT, **fields})  # type: ignore[arg-type]
        return await self.bus.request(
            subjects.LAYER_BEGIN, request, budget_s=5, project=self.project
        )

    async def send(self, started: PublishStarted, data: bytes) -> None:
        for offset in range(0, len(data), started.chunk_bytes):
            piece = data[offset : offset + started.chunk_bytes]
            chunk = PublishChunk(upload_id=started.upload_id, offset=offset, data=piece)
            await self.bus.request(
                subjects.LAYER_CHUNK, chunk, budget_s=5, project=self.project, node=started.node
            )

    async def commit(
        self,
        started: PublishStarted,
        data: bytes,
        *,
        sha256: str | None = None,
        budget_s: float = 30,
    ) -> LayerInfo:
        request = PublishCommit(
            upload_id=started.upload_id,
            size_bytes=len(data),
            sha256=sha256 or hashlib.sha256(data).hexdigest(),
        )
        return await self.bus.request(
            subjects.LAYER_COMMIT,
            request,
            budget_s=budget_s,
            project=self.project,
            node=started.node,
        )

    async def publish(self, data: bytes, name: str = "tool", **fields: object) -> LayerInfo:
        started = await self.begin(name, **fields)
        await self.send(started, data)
        return await self.commit(started, data)

    async def info(self, ref: str) -> LayerInfo:
        query = LayerQuery(ref=ref)
        return await self.bus.request(subjects.LAYER_INFO, query, budget_s=5, project=self.project)

    async def remove(self, ref: str) -> LayerInfo:
        query = LayerQuery(ref=ref)
        return await self.bus.request(
            subjects.LAYER_REMOVE, query, budget_s=5, project=self.project
        )


def archive(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
async def node(bus: Bus, tmp_path: Path) -> AsyncIterator[PublishingNode]:
    await ensure_topology(bus, buckets=[subjects.LAYERS])
    node = PublishingNode(bus, tmp_path)
    await node.serve()
    yield node
    await node.close()


@pytest.fixture
def caller(node: PublishingNode) -> Caller:
    return Caller(node.bus, "p")


async def test_an_archive_of_many_chunks_becomes_a_layer_whose_files_are_mounted(
    node: PublishingNode, caller: Caller
) -> None:
    content = os.urandom(900_000)
    config = ImageConfig(env={"A": "b"}, workdir="/w")
    layer = await caller.publish(archive(data=content), config=config)
    assert (layer.ref, layer.files, layer.config) == ("p/tool@1", 1, config)
    assert await caller.info("tool") == layer
    stack = await node.mounts.acquire("s", ResolvedLayers(base=layer))
    assert (stack.lowers[0].path / "data").read_bytes() == content
    assert not list(node.spool.iterdir())


async def test_the_same_archive_twice_is_one_image_and_one_version(
    node: PublishingNode, caller: Caller
) -> None:
    first = await caller.publish(archive(a=b"1"))
    assert await caller.publish(archive(a=b"1")) == first
    other = await caller.publish(archive(a=b"1"), name="another")
    assert other.digest == first.digest
    with pytest.raises(AlreadyExists, match="p/tool@1"):
        await caller.publish(archive(a=b"2"), version="1")
    assert (await caller.info("tool@1")).digest == first.digest


async def test_two_publishers_of_one_version_do_not_both_win(caller: Caller) -> None:
    outcomes = await asyncio.gather(
        *(caller.publish(archive(a=bytes([n])), version="7") for n in range(3)),
        return_exceptions=True,
    )
    won = [outcome for outcome in outcomes if isinstance(outcome, LayerInfo)]
    assert len(won) == 1
    assert sum(isinstance(outcome, AlreadyExists) for outcome in outcomes) == 2
    assert await caller.info("tool@7") == won[0]


async def test_a_commit_whose_caller_gave_up_is_finished_and_answered_again(
    node: PublishingNode, caller: Caller
) -> None:
    data = archive(a=os.urandom(200_000))
    started = await caller.begin()
    await caller.send(started, data)
    with pytest.raises(DeadlineExceeded):
        await caller.commit(started, data, budget_s=0.005)
    layer = await caller.commit(started, data)
    assert await caller.info("tool") == layer
    with pytest.raises(Conflict, match="another size or digest"):
        await caller.commit(started, data, sha256="0" * 64)


async def test_bytes_that_did_not_arrive_whole_make_no_layer(caller: Caller) -> None:
    data = archive(a=b"1")
    started = await caller.begin()
    await caller.send(started, data)
    with pytest.raises(InvalidArgument, match="SHA-256"):
        await caller.commit(started, data, sha256="0" * 64)
    with pytest.raises(NotFound):
        await caller.info("tool")


async def test_a_hostile_archive_makes_no_layer_and_leaves_nothing_behind(
    node: PublishingNode, caller: Caller
) -> None:
    with pytest.raises(InvalidArgument, match=r"contains '\.\.'"):
        await caller.publish(archive(**{"../evil": b"x"}))
    with pytest.raises(NotFound):
        await caller.info("tool")
    assert not list(node.spool.iterdir())
    assert await node.publisher.collect() == 0


async def test_an_upload_belongs_to_its_project(node: PublishingNode, caller: Caller) -> None:
    started = await caller.begin()
    with pytest.raises(NotFound, match="no upload"):
        await Caller(node.bus, "q").send(started, b"x")


async def test_more_uploads_than_allowed_are_refused(caller: Caller) -> None:
    for _ in range(4):
        await caller.begin()
    with pytest.raises(QuotaExceeded, match="already receives 4"):
        await caller.begin()


@pytest.mark.parametrize(
    "fields", [{"name": "Tool"}, {"name": "p/tool"}, {"name": "a@1"}, {"version": "a b"},
               {"config": ImageConfig(env={"A": "x" * 20_000})}],
)  # fmt: skip
async def test_a_bad_name_or_config_is_refused_before_any_byte_is_sent(
    caller: Caller, fields: dict[str, object]
) -> None:
    with pytest.raises(InvalidArgument):
        await caller.begin(**fields)  # type: ignore[arg-type]


async def test_the_public_space_is_written_by_the_listed_projects_and_read_by_all(
    node: PublishingNode, caller: Caller
) -> None:
    operator = Caller(node.bus, "ops")
    with pytest.raises(PermissionDenied, match="'p' may not change"):
        await caller.begin(public=True)
    await operator.publish(archive(a=b"1"), public=True)
    assert (await caller.info("tool")).ref == "public/tool@1"
    with pytest.raises(PermissionDenied):
        await caller.remove("public/tool@1")
    with pytest.raises(NotFound):
        await caller.info("ops/tool")
    await operator.remove("public/tool@1")


async def test_a_layer_in_use_is_not_removed_and_an_unused_image_is_collected(
    node: PublishingNode, caller: Caller
) -> None:
    layer = await caller.publish(archive(a=b"1"))
    twin = await caller.publish(archive(a=b"1"), name="twin")
    await node.mounts.acquire("sandbox-1", ResolvedLayers(base=layer))
    with pytest.raises(Conflict, match="in use by 1 sandboxes of n1, sandbox-1"):
        await caller.remove("tool@1")
    with pytest.raises(InvalidArgument, match="which version"):
        await caller.remove("tool")
    await node.mounts.release("sandbox-1")
    await caller.remove("tool@1")
    with pytest.raises(NotFound):
        await caller.info("tool")
    assert await node.publisher.collect() == 0, "the other name still stands for the image"
    await caller.remove(f"twin@{twin.version}")
    await node.mounts.acquire("sandbox-2", ResolvedLayers(base=layer))
    assert await node.publisher.collect() == 0, "a sandbox here still stacks it"
    await node.mounts.release("sandbox-2")
    assert await node.publisher.collect() == 1
    with pytest.raises(FileNotFoundError):
        node.store.path(layer.digest)


async def test_an_image_named_while_it_was_doomed_is_kept(
    node: PublishingNode, caller: Caller
) -> None:
    layer = await caller.publish(archive(a=b"1"))
    node.store.doom(layer.digest)  # as by a remover that looked before the name was claimed
    assert await node.publisher.collect() == 0
    node.store.verify(layer.digest, layer.size_bytes)
    assert node.store.doomed(0.0) == []
