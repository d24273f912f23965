"""What JetStream answers to a publish, as a value or as the error it means."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Self

from ..errors import Conflict, DSecError, Internal, QuotaExceeded, Unavailable

H_MSG_ID = "Nats-Msg-Id"  # dedupes within the stream's window; one id per publish attempt
H_TTL = "Nats-TTL"

_STORE_FAILED = 10077  # max_msgs or max_bytes reached on a stream that discards new messages
_WRONG_LAST_SEQUENCE = (10071, 10164)  # a compare-and-set lost
_RETRY_S = 1.0


def ttl_header(ttl_s: float) -> str:
    """Whole seconds, at least one: less is refused by the server."""
    return f"{max(1, math.ceil(ttl_s))}s"


@dataclass(frozen=True, slots=True)
class PubAck:
    """The stream has it."""

    stream: str
    seq: int
    duplicate: bool

    @classmethod
    def read(cls, data: bytes, subject: str) -> Self:
        """Read what answered a publish.

        Raises:
            QuotaExceeded: the stream is full.
            Conflict: the publish expected another last sequence.
            Unavailable: JetStream cannot store anything now.
            Internal: something else answered on the subject, or the stream refused the message.
        """
        try:
            answer = json.loads(data)
            if "error" in answer:
                raise refusal(answer["error"], subject)
            return cls(answer["stream"], answer["seq"], answer.get("duplicate", False))
        except (ValueError, KeyError, TypeError) as err:
            raise Internal(f"what answered on {subject} is not a stream") from err


def refusal(error: dict[str, object], subject: str) -> DSecError:
    """The error that JetStream's own error object means."""
    what = f"{subject}: {error.get('description', 'refused')}"
    number = error.get("err_code")
    if number == _STORE_FAILED:
        return QuotaExceeded(
            f"the queue is full: {what}",
            hint="wait until queued requests have been served",
            retry_after_s=_RETRY_S,
        )
    if number in _WRONG_LAST_SEQUENCE:
        return Conflict(f"somebody else was first: {what}")
    if error.get("code") == 503:
        return Unavailable(f"JetStream cannot take it now: {what}", retry_after_s=_RETRY_S)
    return Internal(f"JetStream refused: {what}")
