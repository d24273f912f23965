"""What a claim means to a request that meets it."""

from __future__ import annotations

import pytest

from libdsec.wire.placement import AcceptedItem, Claim, ClaimState, PlaceRequest, claim_key
from libdsec.wire.sandbox import SandboxSpec
from services.scheduler.claims import PATIENCE, Meaning, digest_of, meaning, missing, owned_by


def request(request_id: str = "r1", **spec: object) -> PlaceRequest:
    return PlaceRequest(
        request_id=request_id, key="k", reply_to="_INBOX.p.x", nonce="n", count=2, budget_ms=1,
        spec=SandboxSpec.model_validate({"image": "base"} | spec),
    )  # fmt: skip


def claim(state: ClaimState, *, request_id: str = "r1", items: int = 0, past: tuple[str, ...] = ()
          ) -> Claim:  # fmt: skip
    return Claim(
        request_id=request_id, past=past, digest=digest_of(request()), epoch=1, state=state,
        count=2, items=tuple(AcceptedItem(index=i, sandbox_id=f"x{i}") for i in range(items)),
    )  # fmt: skip


P, W = ClaimState.PLACING, ClaimState.WAITING


@pytest.mark.parametrize(
    ("stored", "asks", "expected"),
    [
        (claim(P), "r1", Meaning.CONTINUE),
        (claim(W), "r1", Meaning.CONTINUE),
        (claim(ClaimState.PLACED, items=2), "r1", Meaning.ANSWER),
        (claim(ClaimState.PLACED, items=1), "r1", Meaning.ANSWER),
        (claim(ClaimState.FAILED), "r1", Meaning.REFUSE),
        (claim(ClaimState.CANCELLED), "r1", Meaning.DROP),
        (claim(P), "r2", Meaning.LOOK_AGAIN),
        (claim(W), "r2", Meaning.LOOK_AGAIN),
        (claim(ClaimState.PLACED, items=2), "r2", Meaning.ANSWER),
        (claim(ClaimState.PLACED, items=1), "r2", Meaning.CONTINUE),
        (claim(ClaimState.FAILED), "r2", Meaning.CONTINUE),
        (claim(ClaimState.CANCELLED), "r2", Meaning.CONTINUE),
        (claim(P, request_id="r2", past=("r1",)), "r1", Meaning.SUPERSEDED),
        (claim(ClaimState.PLACED, request_id="r2", past=("r1",), items=2), "r1", Meaning.DROP),
        (claim(ClaimState.FAILED, request_id="r2", past=("r1",)), "r1", Meaning.REFUSE),
        (claim(ClaimState.CANCELLED, request_id="r2", past=("r1",)), "r1", Meaning.DROP),
    ],
)
def test_same_key_and_arguments(stored: Claim, asks: str, expected: Meaning) -> None:
    assert meaning(stored, request(asks), digest_of(request()), 1) is expected


@pytest.mark.parametrize("state", list(ClaimState))
def test_other_arguments_conflict_whatever_became_of_the_first(state: ClaimState) -> None:
    other = request("r2", image="other")
    assert meaning(claim(state), other, digest_of(other), 1) is Meaning.CONFLICT


def test_a_cancellation_that_came_first_binds_no_arguments() -> None:
    first = claim(ClaimState.CANCELLED).model_copy(update={"digest": ""})
    assert meaning(first, request("r2"), digest_of(request()), 1) is Meaning.CONTINUE


def test_patience_with_an_unfinished_claim_ends() -> None:
    digest = digest_of(request())
    assert meaning(claim(P), request("r2"), digest, PATIENCE) is Meaning.LOOK_AGAIN
    assert meaning(claim(P), request("r2"), digest, PATIENCE + 1) is Meaning.CONTINUE


def test_the_digest_is_of_the_arguments_alone() -> None:
    one, same = request("r1", env={"a": "1", "b": "2"}), request("r2", env={"b": "2", "a": "1"})
    assert digest_of(one) == digest_of(same.model_copy(update={"attempt": 3, "avoid": ("n1",)}))
    assert digest_of(one) != digest_of(one.model_copy(update={"count": 3}))
    assert digest_of(request(backend="container")) == digest_of(request())


def test_missing_items_are_those_the_claim_does_not_name() -> None:
    assert missing(claim(P, items=1)) == [1]


def test_the_newest_request_owns_the_claim_and_the_past_is_bounded() -> None:
    owned = claim(P)
    for number in range(2, 20):
        owned = owned_by(owned, f"r{number}")
    assert owned.request_id == "r19"
    assert owned.past == tuple(f"r{number}" for number in range(11, 19))
    assert owned_by(owned, "r19") is owned


def test_claim_keys_take_any_text_and_tell_projects_apart() -> None:
    assert claim_key("p", "a key: with * everything >") != claim_key("p", "another")
    assert claim_key("p", "k") != claim_key("q", "k")
