"""Scatter and gather: one request to everybody, and who has answered by the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import DataLoss, DeadlineExceeded, DSecError, Internal, PermissionDenied
from ..wire.envelope import H_FROM
from ..wire.model import Message
from .call import Budget, Part
from .inbox import Inbox

Rep = TypeVar("Rep", bound=Message)

FROM = H_FROM.lower()


@dataclass(frozen=True, slots=True)
class Gathered(Generic[Rep]):
    """The answers by sender.

    Attributes:
        missing: those of the expected who did not answer in time.
        dropped: answers thrown away because there were more than the limit.
    """

    replies: Mapping[str, Rep]
    errors: Mapping[str, DSecError]
    missing: frozenset[str]
    dropped: bool = False


async def gather(
    inbox: Inbox, reply: type[Rep], *, budget: Budget, expect: Collection[str]
) -> Gathered[Rep]:
    """Read answers until all expected ones are there or the budget is used up.

    Raises:
        PermissionDenied: these credentials may not ask.
    """
    replies: dict[str, Rep] = {}
    errors: dict[str, DSecError] = {}
    waiting = set(expect)
    dropped = False
    while not budget.expired and (waiting or not expect):
        try:
            item = await inbox.take(budget.remaining_s)
        except DeadlineExceeded:
            break
        if isinstance(item, PermissionDenied):
            raise item
        if isinstance(item, DSecError):
            dropped = isinstance(item, DataLoss)
            break  # nobody listens, or the connection is lost: no more will come
        sender = item.headers.get(FROM, "")
        outcome = _outcome(item, reply)
        if isinstance(outcome, DSecError):
            errors[sender] = outcome
        else:
            replies[sender] = outcome
        waiting.discard(sender)
    return Gathered(replies, errors, frozenset(waiting), dropped)


def _outcome(part: Part, reply: type[Rep]) -> Rep | DSecError:
    try:
        return part.error() or part.decode(reply)
    except Internal as err:
        return err
