"""Layers: what becomes of a directory or an archive, and what is refused."""

from __future__ import annotations

import bz2
import io
import socket
import tarfile
from pathlib import Path

import pytest

from libdsec import (
    AlreadyExists,
    DataLoss,
    DSecClient,
    InvalidArgument,
    LayerKind,
    NotFound,
    Upload,
)
from libdsec.bus import Call
from libdsec.wire.layer import PublishChunk, PublishProgress
from libdsec.wire.subjects import LAYER_CHUNK
from tests.world.world import World, replace


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_bytes(b"x" * 300_000)
    (root / "bin/tool").chmod(0o755)
    (root / "link").symlink_to("/bin/tool")
    return root


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {m.name.removeprefix("./"): m for m in archive}


async def test_a_directory_becomes_a_layer(world: World, client: DSecClient, source: Path) -> None:
    seen: list[Upload] = []
    layer = await client.layers.publish(
        source, "tools@7", "toolkit", env={"PATH": "/bin"}, on_progress=seen.append
    )
    assert (layer.ref, layer.kind, layer.files) == ("default/tools@7", LayerKind.TOOLKIT, 1)
    assert layer.config.env == {"PATH": "/bin"}
    packed = members(world.edge.archives[layer.ref])
    assert (packed["bin/tool"].mode, packed["link"].linkname) == (0o755, "/bin/tool")
    assert {(m.uid, m.gid, m.uname) for m in packed.values()} == {(0, 0, "")}
    assert len(seen) > 3
    assert seen[-1].sent_bytes == layer.size_bytes
    with pytest.raises(AlreadyExists, match="tools@7"):
        await client.layers.publish(source, "tools@7", "toolkit")


async def test_the_same_tree_is_the_same_archive(
    world: World, client: DSecClient, source: Path
) -> None:
    first = await client.layers.publish(source, "a", "workspace")
    second = await client.layers.publish(source, "b", "workspace")
    assert first.digest == second.digest


async def test_archives_are_sent_as_they_are_or_unpacked(
    world: World, client: DSecClient, source: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "layer.tar"
    with tarfile.open(plain, "w") as archive:
        archive.add(source, ".")
    squeezed = tmp_path / "layer.tar.bz2"
    squeezed.write_bytes(bz2.compress(plain.read_bytes()))
    for path in (plain, squeezed):
        layer = await client.layers.publish(path, f"from-{path.suffix[1:]}", "base")
        assert world.edge.archives[layer.ref] == plain.read_bytes()


async def test_layers_are_listed_looked_at_and_removed(client: DSecClient, source: Path) -> None:
    for name, kind in (("w", "workspace"), ("t", "toolkit"), ("t", "toolkit")):
        await client.layers.publish(source, name, kind)
    assert [layer.ref for layer in await client.layers.list(kind="toolkit")] == [
        "default/t@1", "default/t@2"
    ]  # fmt: skip
    short = await client.layers.list(limit=2)
    assert (len(short), short.dropped) == (2, 1)
    newest = await client.layers.info("t")
    assert newest.version == "2"
    await client.create(image="w@1", workspace=newest)
    with pytest.raises(InvalidArgument, match="which version"):
        await client.layers.remove("t")
    assert (await client.layers.remove("t@2")).version == "2"
    with pytest.raises(NotFound):
        await client.layers.info("t@2")


async def test_a_layer_that_cannot_be_is_refused(
    world: World, client: DSecClient, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="nothing at"):
        await client.layers.publish(tmp_path / "no", "x", "base")
    with pytest.raises(InvalidArgument, match="unknown kind"):
        await client.layers.publish(source, "x", "image")
    with pytest.raises(InvalidArgument, match="space"):
        await client.layers.publish(source, "public/x", "base")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(source / "sock"))
        with pytest.raises(InvalidArgument, match="socket"):
            await client.layers.publish(source, "x", "base")
    assert not world.edge.layers


async def test_a_publisher_that_lost_a_piece_is_noticed(
    world: World, client: DSecClient, source: Path
) -> None:
    async def forgets(message: PublishChunk, call: Call) -> PublishProgress:
        return PublishProgress(received=message.offset)

    await replace(world, LAYER_CHUNK, forgets)
    with pytest.raises(DataLoss, match="n1 has 0 of"):
        await client.layers.publish(source, "x", "base")
