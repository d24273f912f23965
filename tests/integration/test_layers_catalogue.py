"""The catalogue over real JetStream: names are claimed once, the newest is the highest."""

from __future__ import annotations

import asyncio

import pytest

from libdsec.bus import Bus
from libdsec.errors import AlreadyExists, DSecError, InvalidArgument, NotFound
from libdsec.wire.layer import ImageConfig, LayerInfo, LayerKind, LayerQuery, layer_key, newest_key
from libdsec.wire.subjects import LAYERS
from services.chassis.kv import KeyValue
from services.chassis.topology import ensure_topology
from services.edge.layers.catalogue import Catalogue


def layer(content: str, name: str = "tool.kit", space: str = "p", **fields: object) -> LayerInfo:
    known: dict[str, object] = {
        "version": "", "digest": content.encode().hex().ljust(64, "0"), "kind": LayerKind.TOOLKIT,
        "size_bytes": 1, "files": 1, "created_at": 0.0,
    }  # fmt: skip
    return LayerInfo(space=space, name=name, **{**known, **fields})  # type: ignore[arg-type]


@pytest.fixture
async def catalogue(bus: Bus) -> Catalogue:
    await ensure_topology(bus, buckets=[LAYERS])
    return Catalogue(bus)


async def test_a_name_without_version_gets_the_next_number(catalogue: Catalogue) -> None:
    assert (await catalogue.claim(layer("a"), None)).version == "1"
    assert (await catalogue.claim(layer("b"), None)).version == "2"
    await catalogue.claim(layer("c"), "41")
    await catalogue.claim(layer("d"), "2026-01-03")
    assert (await catalogue.claim(layer("e"), None)).version == "42"


async def test_the_same_layer_again_is_the_same_answer(catalogue: Catalogue) -> None:
    first = await catalogue.claim(layer("a", created_at=1.0), None)
    assert await catalogue.claim(layer("a", created_at=2.0), None) == first
    assert await catalogue.claim(layer("a", created_at=3.0), "1") == first


async def test_a_taken_version_is_refused_and_unchanged(catalogue: Catalogue) -> None:
    await catalogue.claim(layer("a"), "1")
    others = (layer("b"), layer("a", kind=LayerKind.BASE), layer("a", config=ImageConfig(user="u")))
    for other in others:
        with pytest.raises(AlreadyExists, match=r"p/tool\.kit@1"):
            await catalogue.claim(other, "1")
    assert (await catalogue.resolve("p", "tool.kit@1")).digest == layer("a").digest


async def test_of_many_publishers_of_one_version_one_wins(catalogue: Catalogue) -> None:
    async def claim(content: str) -> LayerInfo | DSecError:
        try:
            return await catalogue.claim(layer(content), "1")
        except AlreadyExists as err:
            return err

    outcomes = await asyncio.gather(*(claim(c) for c in "abcdefgh"))
    won = [outcome for outcome in outcomes if isinstance(outcome, LayerInfo)]
    assert len(won) == 1
    assert await catalogue.resolve("p", "tool.kit@1") == won[0]
    assert await catalogue.resolve("p", "tool.kit") == won[0]


async def test_many_publishers_without_a_version_get_numbers_of_their_own(
    catalogue: Catalogue,
) -> None:
    claimed = await asyncio.gather(*(catalogue.claim(layer(c), None) for c in "abcdefgh"))
    assert sorted(int(c.version) for c in claimed) == list(range(1, 9))
    assert (await catalogue.resolve("p", "tool.kit")).version == "8"


async def test_the_newest_is_the_highest_version_not_the_last_one(catalogue: Catalogue) -> None:
    for content, version in (("a", "1.9"), ("b", "1.10"), ("c", "1.2")):
        await catalogue.claim(layer(content), version)
    assert (await catalogue.resolve("p", "tool.kit")).version == "1.10"


async def test_removing_the_newest_makes_the_one_below_it_newest(catalogue: Catalogue) -> None:
    for content, version in (("a", "1"), ("b", "2"), ("c", "10")):
        await catalogue.claim(layer(content), version)
    await catalogue.remove(await catalogue.resolve("p", "tool.kit@10"))
    assert (await catalogue.resolve("p", "tool.kit")).version == "2"
    await catalogue.remove(await catalogue.resolve("p", "tool.kit@1"))
    assert (await catalogue.resolve("p", "tool.kit")).version == "2"
    await catalogue.remove(await catalogue.resolve("p", "tool.kit"))
    with pytest.raises(NotFound):
        await catalogue.resolve("p", "tool.kit")
    assert (await catalogue.claim(layer("d"), None)).version == "1"


async def test_a_publisher_that_died_between_its_writes_is_completed_by_the_next(
    catalogue: Catalogue, bus: Bus
) -> None:
    await catalogue.claim(layer("a"), "1")
    half = layer("b", version="2")
    await KeyValue(bus, LAYERS).create(layer_key("p", half.name, "2"), half)
    assert (await catalogue.resolve("p", "tool.kit")).version == "1"
    assert await catalogue.claim(layer("b"), "2") == half
    assert (await catalogue.resolve("p", "tool.kit")).version == "2"


async def test_a_project_sees_its_own_layers_and_the_public_ones(catalogue: Catalogue) -> None:
    await catalogue.claim(layer("public", space="public"), "1")
    await catalogue.claim(layer("other", space="q"), "1")
    assert (await catalogue.resolve("p", "tool.kit")).space == "public"
    await catalogue.claim(layer("own"), "1")
    assert (await catalogue.resolve("p", "tool.kit@1")).space == "p"
    assert (await catalogue.resolve("p", "public/tool.kit")).space == "public"
    with pytest.raises(NotFound):
        await catalogue.resolve("p", "q/tool.kit")
    listing = await catalogue.listing("p", LayerQuery())
    assert [found.space for found in listing.layers] == ["p", "public"]
    with pytest.raises(NotFound):
        await catalogue.listing("p", LayerQuery(ref="q/tool.kit"))


async def test_a_listing_is_in_the_order_of_versions_and_says_what_it_left_out(
    catalogue: Catalogue,
) -> None:
    for n in range(12):
        await catalogue.claim(layer(str(n)), None)
    await catalogue.claim(layer("x", name="tool", kind=LayerKind.BASE), "1")
    found = await catalogue.listing("p", LayerQuery(ref="tool.kit", limit=11))
    assert [known.version for known in found.layers] == [str(n) for n in range(1, 12)]
    assert found.dropped == 1
    bases = await catalogue.listing("p", LayerQuery(kind=LayerKind.BASE))
    assert [known.name for known in bases.layers] == ["tool"]
    with pytest.raises(InvalidArgument):
        await catalogue.listing("p", LayerQuery(ref="tool@1"))


async def test_a_listing_stays_within_one_message(catalogue: Catalogue) -> None:
    big = ImageConfig(env={"A": "x" * 15_000})
    for n in range(60):
        await catalogue.claim(layer(str(n), config=big), None)
    found = await catalogue.listing("p", LayerQuery())
    assert len(found.encode()) < 1 << 20
    assert len(found.layers) + found.dropped == 60
    assert found.dropped > 0


async def test_digests_are_those_of_every_space(catalogue: Catalogue) -> None:
    await catalogue.claim(layer("a"), None)
    await catalogue.claim(layer("b", space="q"), None)
    assert await catalogue.digests() == {layer("a").digest, layer("b").digest}
    assert newest_key("p", "tool.kit") != layer_key("p", "tool.kit", "1")
