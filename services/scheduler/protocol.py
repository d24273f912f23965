"""What happens to one request: claim, offer, verdict. Pure: it yields effects (see `effects`).

The request ends in Done only when its claim says what became of every item, or when it can have no
claim (arguments that can never work). A claim that others have moved on is left alone: Park, and
see what it says next time.
"""

from __future__ import annotations

from typing import Final

from libdsec.errors import (
    ERRORS,
    Conflict,
    DeadlineExceeded,
    DeathReason,
    DSecError,
    NoCapacity,
    SandboxDead,
)
from libdsec.wire.defaults import OFFER_TIMEOUT_S
from libdsec.wire.error import ErrorReply
from libdsec.wire.placement import Announcement, ClaimState, PlaceRequest, Progress

from .attempt import Attempt, Cluster, Job
from .claims import Meaning, meaning, owned_by
from .effects import (
    AnnounceAgain,
    Answer,
    Done,
    Outcome,
    Park,
    ReadClaim,
    Steps,
    Stored,
    WriteClaim,
    do,
)
from .placement import Choice

MAX_ROUNDS: Final = 3  # of offers in one delivery; each takes at most OFFER_TIMEOUT_S
LOOK_AGAIN: Final = Park(1.0)  # others are at work on the claim
LAST_WORD_S: Final = 0.3  # the caller hears NoCapacity this long before its own clock runs out


def place(job: Job, cluster: Cluster) -> Steps[Outcome]:
    """Handle one delivery of a request; the result says what to tell the queue."""
    at = Attempt(job, cluster)
    stored = (yield from do(ReadClaim(at.key))) if job.deliveries > 1 else None
    if stored is None:
        refusal = yield from at.prepare(None)
        if refusal is None and (yield from at.create()):
            return (yield from _fill(at))
        stored = yield from do(ReadClaim(at.key))
        if stored is None and refusal is not None:
            return (yield from _refuse(at, refusal))
        if stored is None:
            return LOOK_AGAIN
    return (yield from _resume(at, stored))


def _resume(at: Attempt, stored: Stored) -> Steps[Outcome]:
    """The key is claimed already: by this request, by one before it, or by another's."""
    at.claim, at.revision = stored.claim, stored.revision
    match meaning(at.claim, at.request, at.job.digest, at.job.deliveries):
        case Meaning.CONFLICT:
            return (yield from _refuse(at, _conflict(at.request)))
        case Meaning.ANSWER:
            first = at.claim.request_id != at.request.request_id
            return (yield from _announce_again(at, first=first))
        case Meaning.REFUSE:
            return (yield from _refuse(at, next(iter(at.claim.failed.values())).exception()))
        case Meaning.DROP:
            return Done()
        case Meaning.SUPERSEDED:
            return (yield from _refuse(at, _superseded(at.request)))
        case Meaning.LOOK_AGAIN if at.left_s > 0:
            return LOOK_AGAIN
        case Meaning.LOOK_AGAIN:
            return (yield from _refuse(at, _no_capacity(at, Choice())))
        case Meaning.CONTINUE:
            return (yield from _continue(at))


def _continue(at: Attempt) -> Steps[Outcome]:
    """Take the claim under a new epoch and place what it lacks."""
    before = at.claim
    over = before.state in (ClaimState.FAILED, ClaimState.CANCELLED)
    refusal = yield from at.prepare(None if over else before)
    if refusal is not None:
        return (yield from _refuse(at, refusal) if over else _give_up(at, refusal))
    if before.state is ClaimState.WAITING and at.left_s > 0 and at.missing:
        choice = at.cluster.choose(at.need, 0, ())
        if not choice.possible:  # the usual case of a request that waits
            return (yield from _park(at, choice, unchanged=True))
    if not (yield from at.advance()):
        return LOOK_AGAIN
    yield from at.withdraw()
    if before.state is ClaimState.PLACING:
        yield from at.find(before.request_id, at.cluster.names())
    inherits = bool(at.claim.items) and before.request_id != at.request.request_id
    outcome = yield from _fill(at)
    if inherits and isinstance(outcome, Done):
        return (yield from _announce_again(at, first=True))  # their edges know another inbox
    return outcome


def _fill(at: Attempt) -> Steps[Outcome]:
    """Offer until every item is accepted, nobody is left to ask, or the time is over."""
    tried: set[str] = set()
    choice = Choice()
    for _ in range(MAX_ROUNDS):
        if not at.missing or at.left_s <= 0:
            break
        choice = at.cluster.choose(at.need, len(at.missing), tried)
        if not choice.groups:
            break
        silent = yield from at.offer(choice, tried)
        if silent:
            if not (yield from at.advance()):
                return LOOK_AGAIN
            yield from at.find(at.request.request_id, silent)
    if at.missing:
        return (yield from _park(at, choice, unchanged=False))
    return Done() if (yield from at.commit(ClaimState.PLACED, {})) else LOOK_AGAIN


def _park(at: Attempt, choice: Choice, *, unchanged: bool) -> Steps[Outcome]:
    """Nobody takes the rest now: wait if the budget allows, else say why not."""
    hopeless = _hopeless(at, choice)
    left_s = at.left_s - LAST_WORD_S
    if hopeless is not None or left_s <= 0:
        return (yield from _give_up(at, hopeless or _no_capacity(at, choice)))
    if not unchanged and not (yield from at.commit(ClaimState.WAITING, {})):
        return LOOK_AGAIN
    progress = Progress(
        request_id=at.request.request_id,
        reason=_no_capacity(at, choice).message,
        dropped_by_filter=choice.dropped,
    )
    yield from do(Answer(at.request, progress))
    return Park(min(left_s, 0.125 * 2 ** min(at.job.deliveries, 3)))


def _give_up(at: Attempt, error: DSecError) -> Steps[Outcome]:
    """Store the error for what is missing, then tell the caller."""
    reply = ErrorReply.of(error, request_id=at.request.request_id)
    failed = dict.fromkeys(at.missing, reply)
    state = ClaimState.PLACED if at.items else ClaimState.FAILED
    if at.claim.request_id != at.request.request_id:
        return (yield from _refuse(at, error))  # an earlier request's; it may yet do better
    if not (yield from at.commit(state, failed)):
        return LOOK_AGAIN
    if state is ClaimState.FAILED:
        return (yield from _refuse(at, error))
    return (yield from _report(at, failed))


def _announce_again(at: Attempt, *, first: bool) -> Steps[Outcome]:
    """Everything is placed: the claim is this caller's now, and its edges tell it so.

    What a lost node holds has failed for a caller that cannot have heard of it (`first`), and the
    claim says so: the node ends it if it ever comes back. One that may have heard of it decides by
    itself, when its time is over.
    """
    claim = owned_by(at.claim, at.request.request_id)
    if claim is not at.claim and not (yield from at.store(claim)):
        return LOOK_AGAIN
    verdicts = at.verdicts(at.claim.items)
    agreed = yield from do(AnnounceAgain(verdicts, OFFER_TIMEOUT_S))
    silent = {node: verdict for node, verdict in verdicts.items() if node not in agreed}
    lost = {node: verdict for node, verdict in silent.items() if at.cluster.lost(node)}
    if len(lost) < len(silent) and at.left_s > 0:
        return LOOK_AGAIN
    failed = dict(at.claim.failed)
    if lost and first:
        for node, verdict in lost.items():
            dead = SandboxDead(f"node {node} is lost", reason=DeathReason.NODE_LOST)
            failed |= {item.index: ErrorReply.of(dead) for item in verdict.confirmed}
        if not (yield from _condemn(at, failed)):
            return LOOK_AGAIN
    return (yield from _report(at, failed)) if failed else Done()


def _condemn(at: Attempt, failed: dict[int, ErrorReply]) -> Steps[bool]:
    items = tuple(item for item in at.claim.items if item.index not in failed)
    update = {
        "items": items,
        "failed": failed,
        "epoch": at.claim.epoch + 1,
        "state": ClaimState.PLACED if items else ClaimState.FAILED,
    }
    claim = at.claim.model_copy(update=update)
    return (yield from do(WriteClaim(at.key, claim, at.revision))) is not None


def _refuse(at: Attempt, error: DSecError) -> Steps[Outcome]:
    yield from do(Answer(at.request, error))
    return Done()


def _report(at: Attempt, failed: dict[int, ErrorReply]) -> Steps[Outcome]:
    message = Announcement(request_id=at.request.request_id, failed=failed)
    yield from do(Answer(at.request, message))
    return Done()


def _hopeless(at: Attempt, choice: Choice) -> DSecError | None:
    """The refusal, if everybody has refused in a way that waiting does not change. Conflict is
    about an epoch, not about the arguments."""
    if choice.open or not at.refusals:
        return None
    for refusal in at.refusals:
        kind = ERRORS.get(refusal.code)
        if kind is None or kind.retryable or kind is Conflict:
            return None
    return at.refusals[-1].exception()


def _no_capacity(at: Attempt, choice: Choice) -> DSecError:
    """Why it could not be placed, with the nodes that each filter dropped."""
    if not choice.dropped and not at.refusals:
        return DeadlineExceeded("the request's time ran out in the queue")
    counts = ", ".join(f"{name} {n}" for name, n in choice.dropped.items())
    refused = f"; last refusal: {at.refusals[-1].message}" if at.refusals else ""
    return NoCapacity(f"no node takes it now; dropped by filter: {counts or 'none'}{refused}")


def _superseded(request: PlaceRequest) -> Conflict:
    return Conflict(f"a newer call with key {request.key!r} has taken this one's place")


def _conflict(request: PlaceRequest) -> Conflict:
    return Conflict(
        f"key {request.key!r} was used with other arguments", hint="use another idempotency key"
    )
