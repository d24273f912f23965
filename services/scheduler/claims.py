"""What a claim means for a request that meets it. Pure."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from enum import Enum
from typing import Final

from libdsec.wire.ids import sandbox_node
from libdsec.wire.placement import (
    PAST_REQUESTS,
    AcceptedItem,
    Claim,
    ClaimState,
    PlaceRequest,
    Verdict,
)

# How often a request looks at another's unfinished claim of the same key (once a second) before it
# takes it over: longer than a delivery stays with a scheduler that has died.
PATIENCE: Final = 20


class Meaning(Enum):
    """What is to be done with a request whose key is claimed."""

    CONFLICT = "the key belongs to other arguments"
    ANSWER = "everything is placed: have it announced again"
    REFUSE = "this very request has failed before"
    DROP = "this request was cancelled, or its edges know all they need to answer it"
    SUPERSEDED = "a newer request with this key has taken the claim over"
    LOOK_AGAIN = "another request with this key is being placed"
    CONTINUE = "take the claim and place what it lacks"


def digest_of(request: PlaceRequest) -> str:
    """Of the arguments as the caller gave them; fields left at their default do not count, so
    that a scheduler which knows more fields computes the same."""
    spec = request.spec.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps([request.count, spec], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def meaning(claim: Claim, request: PlaceRequest, digest: str, looks: int) -> Meaning:
    """`looks`: how often the queue has delivered this request."""
    if claim.digest not in ("", digest):
        return Meaning.CONFLICT
    same = claim.request_id == request.request_id
    past = request.request_id in claim.past
    match claim.state:
        case ClaimState.FAILED if same or past:
            return Meaning.REFUSE
        case ClaimState.PLACING | ClaimState.WAITING if past:
            return Meaning.SUPERSEDED
        case _ if past:
            return Meaning.DROP
        case ClaimState.CANCELLED if same:
            return Meaning.DROP
        case ClaimState.PLACED if same or len(claim.items) == claim.count:
            return Meaning.ANSWER
        case ClaimState.PLACING | ClaimState.WAITING if not same and looks <= PATIENCE:
            return Meaning.LOOK_AGAIN
        case _:
            return Meaning.CONTINUE


def owned_by(claim: Claim, request_id: str) -> Claim:
    """The claim with its newest request; the one before is past, and so powerless over it."""
    if claim.request_id == request_id:
        return claim
    past = (*(r for r in claim.past if r != request_id), claim.request_id)
    return claim.model_copy(update={"request_id": request_id, "past": past[-PAST_REQUESTS:]})


def withdrawals(claim: Claim, project: str) -> dict[str, Verdict]:
    """What the nodes of condemned sandboxes are told."""
    return {
        node: Verdict(request_id=claim.request_id, project=project, lost=items)
        for node, items in by_node(claim.condemned).items()
    }


def missing(claim: Claim) -> list[int]:
    held = {item.index for item in claim.items}
    return [i for i in range(claim.count) if i not in held]


def by_node(items: Iterable[AcceptedItem]) -> dict[str, tuple[AcceptedItem, ...]]:
    """Grouped by the node that a sandbox's id names."""
    groups: dict[str, list[AcceptedItem]] = defaultdict(list)
    for item in items:
        groups[sandbox_node(item.sandbox_id)].append(item)
    return {node: tuple(group) for node, group in groups.items()}
