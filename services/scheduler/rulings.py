"""What a scheduler answers to those who come with a question about a claim: an edge that waits for
a verdict, an edge whose start failed, a caller who cancels. Pure, as `protocol`."""

from __future__ import annotations

from typing import Final

from libdsec.errors import DeadlineExceeded, Unavailable
from libdsec.wire.error import ErrorReply
from libdsec.wire.placement import (
    PAST_REQUESTS,
    AcceptedItem,
    CancelRequest,
    Claim,
    ClaimState,
    Held,
    RetryReply,
    RetryRequest,
    Verdict,
    claim_key,
)

from .attempt import WITHDRAW_TIMEOUT_S
from .claims import by_node, digest_of, withdrawals
from .effects import ReadClaim, Republish, Steps, Withdraw, WriteClaim, do

TRIES: Final = 5  # of a compare-and-set against other writers before the caller has to come back
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
    names = {item.index: item.sandbox_id for item in claim.items}
    settled = claim.state is not ClaimState.PLACING
    confirmed, lost = [], []
    for item in (*held.items, *held.ended):
        if names.get(item.index) == item.sandbox_id:
            confirmed.append(item)
        elif item.index in names or item in claim.condemned or settled:
            lost.append(item)  # while it is being placed, an item may still be taken over
    return Verdict(
        request_id=held.request_id,
        project=held.project,
        epoch=claim.epoch if claim.request_id == held.request_id else 0,
        confirmed=tuple(confirmed),
        lost=tuple(lost),
    )


def free(retry: RetryRequest) -> Steps[RetryReply]:
    """Items that an edge could not start: the claim forgets them, and the request goes into the
    queue again, unless a newer one owns the claim by now. Said twice it has the effect of once."""
    request, key = retry.place, claim_key(retry.project, retry.place.key)
    claim = yield from _forget(retry, key)
    if claim is None or claim.request_id != request.request_id:
        return RetryReply()
    again = tuple(i.index for i in retry.items if i.index not in claim.failed)
    if not again or claim.state in (ClaimState.CANCELLED, ClaimState.FAILED):
        return RetryReply()
    if claim.state in _OPEN:
        message_id = f"{retry.project}.{request.request_id}.{request.attempt}.{min(again)}"
        yield from do(Republish(retry.project, request, message_id))
    return RetryReply(again=again)


def _forget(retry: RetryRequest, key: str) -> Steps[Claim | None]:
    """The claim without the dead sandboxes; None if it is not the claim of what was asked for: a
    node can have placed again what somebody asked for, and nothing else."""
    dead = {item.sandbox_id for item in retry.items}
    for _ in range(TRIES):
        stored = yield from do(ReadClaim(key))
        if stored is None or stored.claim.digest != digest_of(retry.place):
            return None
        claim = stored.claim
        gone = [item for item in claim.items if item.sandbox_id in dead]
        if not gone:
            return claim
        mine = claim.request_id == retry.request_id
        update: dict[str, object] = {
            "items": tuple(item for item in claim.items if item not in gone),
            "epoch": claim.epoch + 1,
        }
        if claim.state is ClaimState.PLACED and mine:
            update["state"] = ClaimState.WAITING
        elif claim.state is ClaimState.PLACED:
            update["failed"] = claim.failed | {item.index: retry.reason for item in gone}
        claim = claim.model_copy(update=update)
        if (yield from do(WriteClaim(key, claim, stored.revision))) is not None:
            return claim
    raise Unavailable(f"the claim of request {retry.request_id} is being fought over")


def cancel(project: str, request: CancelRequest) -> Steps[tuple[AcceptedItem, ...]]:
    """The claim says cancelled, also one that does not exist yet, so that the request is dropped
    when the queue delivers it; what was placed ends, but for what is kept. Gives the sandboxes
    whose nodes have not agreed: say it again, or they end when those nodes ask."""
    key = claim_key(project, request.key)
    for _ in range(TRIES):
        stored = yield from do(ReadClaim(key))
        before, revision = (stored.claim, stored.revision) if stored else (None, 0)
        claim = _cancelled(request, before)
        if claim is not before:
            written = yield from do(WriteClaim(key, claim, revision))
            if written is None:
                continue
            revision = written
        return (yield from _withdraw(key, claim, revision, project))
    raise Unavailable(f"the claim of request {request.request_id} is being fought over")


def _withdraw(
    key: str, claim: Claim, revision: int, project: str
) -> Steps[tuple[AcceptedItem, ...]]:
    if not claim.condemned:
        return ()
    agreed = yield from do(Withdraw(withdrawals(claim, project), WITHDRAW_TIMEOUT_S))
    groups = by_node(claim.condemned)
    left = tuple(i for node, items in groups.items() if node not in agreed for i in items)
    # If the claim has moved on, whoever comes next withdraws them once more, which does no harm.
    yield from do(WriteClaim(key, claim.model_copy(update={"condemned": left}), revision))
    return left


def _cancelled(request: CancelRequest, claim: Claim | None) -> Claim:
    """The claim after the cancellation; itself if that changes nothing."""
    if claim is None:
        return Claim(request_id=request.request_id, digest="", epoch=1, state=ClaimState.CANCELLED)
    if claim.request_id != request.request_id:  # what there is belongs to a newer request
        known = request.request_id in claim.past
        past = (*claim.past, request.request_id)[-PAST_REQUESTS:]
        return claim if known else claim.model_copy(update={"past": past})
    kept = tuple(item for item in claim.items if item.sandbox_id in request.keep)
    ended = claim.state is ClaimState.PLACED and kept == claim.items
    if ended or claim.state is ClaimState.CANCELLED:
        return claim
    dropped = tuple(item for item in claim.items if item not in kept)
    error = ErrorReply.of(DeadlineExceeded("its caller has given up waiting for it"))
    return claim.model_copy(
        update={
            "state": ClaimState.PLACED if kept else ClaimState.CANCELLED,
            "epoch": claim.epoch + 1,
            "items": kept,
            "failed": {i: error for i in range(claim.count) if i not in {k.index for k in kept}},
            "condemned": (*claim.condemned, *dropped),
        }
    )


def _sorted(items: tuple[AcceptedItem, ...]) -> tuple[AcceptedItem, ...]:
    return tuple(sorted(items, key=lambda item: item.index))
