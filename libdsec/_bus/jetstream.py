"""What JetStream answers to a publish, as a value or as the error it means."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from ..errors import DSecError, Internal, QuotaExceeded, Unavailable
from .call import Part

H_MSG_ID = "Nats-Msg-Id"  # dedupes within the stream's window; one id per publish attempt
H_TTL = "Nats-TTL"

_STORE_FAILED = 10077  # max_msgs or max_bytes reached on a stream that discards new messages
_FULL_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class PubAck:
    """The stream has it."""

    stream: str
    seq: int
    duplicate: bool


def ttl_header(ttl_s: float) -> str:
    """Whole seconds, at least one: less is refused by the server."""
    return f"{max(1, math.ceil(ttl_s))}s"


def stored(part: Part, subject: str) -> PubAck:
    """Read the acknowledgement.

    Raises:
        QuotaExceeded: the stream is full.
        Unavailable: JetStream cannot store anything now.
        Internal: something else answered on the subject, or the stream refused the message.
    """
    try:
        answer = json.loads(part.data)
        if "error" in answer:
            raise _refusal(answer["error"], subject)
        return PubAck(answer["stream"], answer["seq"], answer.get("duplicate", False))
    except (ValueError, KeyError, TypeError) as err:
        raise Internal(f"what answered on {subject} is not a stream") from err


def _refusal(error: dict[str, object], subject: str) -> DSecError:
    what = f"{subject}: {error.get('description', 'refused')}"
    if error.get("err_code") == _STORE_FAILED:
        return QuotaExceeded(
            f"the queue is full: {what}",
            hint="wait until queued requests have been served",
            retry_after_s=_FULL_RETRY_S,
        )
    if error.get("code") == 503:
        return Unavailable(f"JetStream cannot take it now: {what}", retry_after_s=_FULL_RETRY_S)
    return Internal(f"the stream refused the message: {what}")
