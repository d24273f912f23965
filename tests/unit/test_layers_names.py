"""Layer names in the catalogue: keys, candidates and the order of versions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libdsec.errors import InvalidArgument, NotFound
from libdsec.wire.layer import (
    ImageConfig,
    LayerInfo,
    LayerKind,
    ResolvedLayers,
    candidate_keys,
    is_newest_key,
    key_pattern,
    layer_key,
    newest_key,
    version_order,
)

NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
VERSIONS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
TOKEN = re.compile(r"[A-Za-z0-9_=-]+")


def layer(name: str, **fields: object) -> LayerInfo:
    known: dict[str, object] = {
        "space": "p", "version": "1", "digest": name * 64, "kind": LayerKind.TOOLKIT,
        "size_bytes": 1, "files": 1, "created_at": 0.0,
    }  # fmt: skip
    return LayerInfo(name=name, **{**known, **fields})  # type: ignore[arg-type]


@given(NAMES, VERSIONS, NAMES, VERSIONS)
def test_keys_are_three_tokens_and_tell_layers_apart(
    name: str, version: str, other: str, other_version: str
) -> None:
    key = layer_key("p", name, version)
    assert all(TOKEN.fullmatch(token) for token in key.split("."))
    assert len(key.split(".")) == 3
    assert (key == layer_key("p", other, other_version)) == (
        (name, version) == (other, other_version)
    )
    assert key != newest_key("p", other)
    assert not is_newest_key(key)
    assert key.startswith(key_pattern("p", name).removesuffix("*"))
    assert key.startswith(key_pattern("p").removesuffix(">"))


def test_a_version_called_like_the_newest_key_is_still_its_own() -> None:
    assert layer_key("p", "a", "newest") != newest_key("p", "a")
    assert is_newest_key(newest_key("p", "a"))


def test_versions_are_ordered_as_people_count() -> None:
    counted = ["v2", "1.0rc1", "1.0", "1.0.1", "1.9", "1.10", "9", "10", "2026-01-03", "2026-01-10"]
    by_spelling = sorted(counted)
    assert sorted(by_spelling, key=version_order) == counted


@given(VERSIONS, VERSIONS)
def test_the_order_of_versions_is_total(one: str, other: str) -> None:
    assert (version_order(one) == version_order(other)) == (one == other)


def test_a_plain_reference_is_the_projects_own_layer_or_else_the_public_one() -> None:
    assert candidate_keys("a.b@2", "p") == (
        layer_key("p", "a.b", "2"),
        layer_key("public", "a.b", "2"),
    )
    assert candidate_keys("a", "public") == (newest_key("public", "a"),)
    assert candidate_keys("public/a@1", "p") == (layer_key("public", "a", "1"),)


def test_another_projects_space_is_not_found_and_nonsense_is_invalid() -> None:
    with pytest.raises(NotFound, match="other/a"):
        candidate_keys("other/a@1", "p")
    for ref in ("", "a@", "A@1", "../a", "a b", "p/a/b", "a@1@2"):
        with pytest.raises(InvalidArgument):
            candidate_keys(ref, "p")


def test_of_two_layers_that_configure_the_upper_one_wins() -> None:
    stack = ResolvedLayers(
        base=layer("b", config=ImageConfig(env={"A": "base", "B": "base"}, user="root")),
        workspace=layer("w", config=ImageConfig(env={"B": "work"}, workdir="/w")),
        toolkits=(layer("t", config=ImageConfig(user="agent")),),
    )
    assert stack.config == ImageConfig(env={"A": "base", "B": "work"}, user="agent", workdir="/w")
