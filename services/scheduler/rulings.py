"""What a scheduler answers to those who come with a question about a claim: an edge that waits for
a verdict, an edge whose start failed, a caller who cancels. Pure, as `protocol`."""

from __future__ import annotations

from typing import Final

from libdsec.errors import Unavailable
from libdsec.wire.placement import (
    AcceptedItem,
    CancelRequest,
    Claim,
    ClaimState,
    Held,
    RetryRequest,
    Verdict,
    claim_key,
)

from .claims import by_node
from .effects import ReadClaim, Republish, Steps, Stored, Withdraw, WriteClaim, do

TRIES: Final = 5  # of a compare-and-set against other writers before the caller has to come back
WITHDRAW_TIMEOUT_S: Final = 2.0
_OPEN: Final = (ClaimState.PLACING, ClaimState.WAITING)


def rule(held: Held) -> Steps[Verdict]:
    """What is to become of an edge's items. Living items that the claim lacks are taken over if
    they were accepted under its present epoch: their scheduler has died, or is just slow."""
    key = claim_key(held.project, held.key)
    stored = yield from do(ReadClaim(key))
    if stored is None:
        return Verdict(request_id=held.request_id, project=held.project)
    claim = stored.claim
    if _open_to(claim, held):
        named = {item.index for item in claim.items}
        found = tuple(item for item in held.items if item.index not in named)
        if found:
            claim = claim.model_copy(update={"items": _sorted((*claim.items, *found))})
            if (yield from do(WriteClaim(key, claim, stored.revision))) is None:
                return Verdict(request_id=held.request_id, project=held.project)
    return _verdict(claim, held)


def _open_to(claim: Claim, held: Held) -> bool:
    return (
        claim.state in _OPEN and claim.request_id == held.request_id and claim.epoch == held.epoch
    )


def _verdict(claim: Claim, held: Held) -> Verdict:
    over = claim.state in (ClaimState.CANCELLED, ClaimState.FAILED)
    names = {} if over else {item.index: item.sandbox_id for item in claim.items}
    confirmed, lost = [], []
    for item in (*held.items, *held.ended):
        if names.get(item.index) == item.sandbox_id:
            confirmed.append(item)
        elif item.index in names or claim.state is not ClaimState.PLACING:
            lost.append(item)  # while it is being placed, an item may still be taken over
    return Verdict(
        request_id=held.request_id,
        project=held.project,
        epoch=claim.epoch if claim.request_id == held.request_id else 0,
        confirmed=tuple(confirmed),
        lost=tuple(lost),
    )


def free(retry: RetryRequest) -> Steps[None]:
    """Items that an edge could not start: the claim forgets them, and the request goes into the
    queue again. Said twice it has the effect of once."""
    request, key = retry.place, claim_key(retry.project, retry.place.key)
    dead = {item.sandbox_id for item in retry.items}
    for _ in range(TRIES):
        stored = yield from do(ReadClaim(key))
        if stored is None or stored.claim.request_id != request.request_id:
            return
        claim = stored.claim
        if not any(item.sandbox_id in dead for item in claim.items):
            break
        claim = claim.model_copy(
            update={
                "items": tuple(i for i in claim.items if i.sandbox_id not in dead),
                "epoch": claim.epoch + 1,
                "state": ClaimState.WAITING if claim.state is ClaimState.PLACED else claim.state,
            }
        )
        if (yield from do(WriteClaim(key, claim, stored.revision))) is not None:
            break
    else:
        raise Unavailable(f"the claim of request {request.request_id} is being fought over")
    if claim.state in _OPEN:
        first = min(item.index for item in retry.items)
        message_id = f"{retry.project}.{request.request_id}.{request.attempt}.{first}"
        yield from do(Republish(retry.project, request, message_id))


def cancel(project: str, request: CancelRequest) -> Steps[tuple[AcceptedItem, ...]]:
    """The claim says cancelled, also one that does not exist yet, so that the request is dropped
    when the queue delivers it; what was placed ends. Gives the sandboxes whose nodes have not
    agreed: they end when those nodes ask."""
    key = claim_key(project, request.key)
    for _ in range(TRIES):
        stored = yield from do(ReadClaim(key))
        if stored is not None and stored.claim.request_id != request.request_id:
            return ()
        claim = _cancelled(request, stored)
        if stored is not None and stored.claim.state is ClaimState.CANCELLED:
            break
        revision = stored.revision if stored else 0
        if (yield from do(WriteClaim(key, claim, revision))) is not None:
            break
    else:
        raise Unavailable(f"the claim of request {request.request_id} is being fought over")
    verdicts = {
        node: Verdict(request_id=request.request_id, project=project, epoch=claim.epoch, lost=items)
        for node, items in by_node(claim.items).items()
    }
    if not verdicts:
        return ()
    agreed = yield from do(Withdraw(verdicts, WITHDRAW_TIMEOUT_S))
    return tuple(i for node, v in verdicts.items() if node not in agreed for i in v.lost)


def _cancelled(request: CancelRequest, stored: Stored | None) -> Claim:
    if stored is None:
        return Claim(request_id=request.request_id, digest="", epoch=1, state=ClaimState.CANCELLED)
    if stored.claim.state is ClaimState.CANCELLED:
        return stored.claim
    update = {"state": ClaimState.CANCELLED, "epoch": stored.claim.epoch + 1}
    return stored.claim.model_copy(update=update)


def _sorted(items: tuple[AcceptedItem, ...]) -> tuple[AcceptedItem, ...]:
    return tuple(sorted(items, key=lambda item: item.index))
