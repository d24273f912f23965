"""How a message travels: header names, and the values that declare a subject and its types.

A declaration is data: `bus.request(EXEC, message, ...)` is typed end to end, and no other file
writes a subject string.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, TypeVar

from .model import Message

Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)
Msg = TypeVar("Msg", bound=Message)

# Headers. NATS keeps their case; read them without regard to it.
H_TRACEPARENT = "traceparent"
H_REQUEST_ID = "Dsec-Request-Id"
H_BUDGET_MS = "Dsec-Budget-Ms"  # what remains of the caller's time; never an absolute time
H_NONCE = "Dsec-Nonce"  # echoed in replies: a reply to somebody else's request is dropped
H_VERSION = "Dsec-Version"
H_FROM = "Dsec-From"  # who replied: a node or a service's name, for scatter and gather
H_ERROR = "Dsec-Error"  # present: the payload is an ErrorReply
H_KIND = "Dsec-Kind"  # which message of a reply stream this is
H_STREAM = "Dsec-Stream"  # raw output chunk: 1 or 2
H_OFFSET = "Dsec-Offset"  # raw output chunk: offset of its first byte in the stream

VERSION = "1"


@lru_cache(maxsize=4096)
def format_subject(template: str, project: str, node: str, tail: str) -> str:
    return template.format(project=project, node=node, tail=tail)


@dataclass(frozen=True)
class Rpc(Generic[Req, Rep]):
    """A request with one reply."""

    template: str
    request: type[Req]
    reply: type[Rep]
    owner: str  # who answers, for the message "nobody answers"

    def subject(self, *, project: str = "*", node: str = "*", tail: str = "*") -> str:
        return format_subject(self.template, project, node, tail)


@dataclass(frozen=True)
class StreamingRpc(Generic[Req, Rep]):
    """A request answered by a stream of messages on the reply subject; `reply` ends it."""

    template: str
    request: type[Req]
    reply: type[Rep]
    owner: str

    def subject(self, *, project: str = "*", node: str = "*", tail: str = "*") -> str:
        return format_subject(self.template, project, node, tail)


@dataclass(frozen=True)
class Event(Generic[Msg]):
    """A fact that nobody answers."""

    template: str
    message: type[Msg]

    def subject(self, *, project: str = "*", node: str = "*", tail: str = "*") -> str:
        return format_subject(self.template, project, node, tail)


@dataclass(frozen=True)
class Stream:
    """A JetStream stream, with its bounds as numbers."""

    name: str
    subjects: tuple[str, ...]
    work_queue: bool
    max_age_s: float
    max_bytes: int
    max_msgs: int
    discard_new: bool  # a full stream refuses the publisher instead of forgetting the oldest
    duplicate_window_s: float = 120.0
    allow_ttl: bool = False
    replicas: int = 1


@dataclass(frozen=True)
class Durable:
    """A pull consumer that replicas of one service share."""

    name: str
    stream: Stream
    filter_subject: str
    ack_wait_s: float
    max_deliver: int
    max_ack_pending: int
    backoff_s: tuple[float, ...] = field(default=(1.0, 5.0, 15.0, 30.0))


@dataclass(frozen=True)
class Bucket(Generic[Msg]):
    """A KV bucket of one message type. Keys: tokens of [A-Za-z0-9_=-], joined by dots."""

    name: str
    message: type[Msg]
    ttl_s: float = 0.0
    history: int = 1
    max_bytes: int = 256 << 20
