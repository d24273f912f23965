"""What travels with a message besides its payload: budget, request id, headers.

A handler's `Call` is also found through `current_call()`, so that a request made anywhere below it
takes over the request id and never gives away more time than the caller still has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypedDict, TypeVar

from pydantic import ValidationError

from ..errors import DSecError, Internal
from ..wire.envelope import H_BUDGET_MS, H_ERROR, H_KIND, H_NONCE, H_REQUEST_ID
from ..wire.error import ErrorReply
from ..wire.model import Message

M = TypeVar("M", bound=Message)

Headers = Mapping[str, str]


class Tokens(TypedDict, total=False):
    """The tokens of a subject; a missing one is `*`, which only a subscription may say."""

    project: str
    node: str
    tail: str


# As they are looked up: keys are lower-cased once per message, because NATS keeps whatever case the
# sender chose and other languages' clients canonicalise theirs.
REQUEST_ID = H_REQUEST_ID.lower()
BUDGET_MS = H_BUDGET_MS.lower()
NONCE = H_NONCE.lower()
ERROR = H_ERROR.lower()
KIND = H_KIND.lower()


def lowered(headers: Headers | None) -> dict[str, str]:
    return {key.lower(): value for key, value in headers.items()} if headers else {}


class Budget:
    """What remains of a caller's time, on this process's monotonic clock."""

    __slots__ = ("_deadline",)

    def __init__(self, total_s: float) -> None:
        self._deadline = time.monotonic() + total_s

    @property
    def remaining_s(self) -> float:
        """Never below 0."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def expired(self) -> bool:
        return self._deadline <= time.monotonic()

    def header(self) -> str:
        return str(int(self.remaining_s * 1000))


def stated_budget(headers: Headers, default_s: float, age_s: float = 0.0) -> Budget:
    """What is left of the budget a message states; the default when it states none or nonsense."""
    text = headers.get(BUDGET_MS, "")
    stated_s = int(text) / 1000 if text.isascii() and text.isdigit() else default_s
    return Budget(stated_s - age_s)


@dataclass(frozen=True, slots=True)
class Part:
    """One message that reached a mailbox; `headers` have lower-case keys."""

    kind: str
    data: bytes
    headers: Headers

    def decode(self, model: type[M]) -> M:
        """The payload as a message.

        Raises:
            Internal: it is none, as between a client and services of different ages.
        """
        try:
            return model.model_validate_json(self.data)
        except ValidationError as err:
            raise Internal(
                f"the answer is not a {model.__name__}", hint="are both sides of one version?"
            ) from err

    def error(self) -> DSecError | None:
        """The typed error that the message carries instead of what was asked for."""
        if ERROR not in self.headers:
            return None
        return self.decode(ErrorReply).exception()


class PartSink(Protocol):
    """Where a call's intermediate replies go."""

    async def __call__(self, kind: str, data: bytes, headers: Headers, /) -> None: ...


class Call:
    """What a handler knows about the message it handles, besides the message itself.

    Attributes:
        project, node, tail: taken from the subject, which the server's permissions guard; "" where
            the subject has none.
        headers: with lower-case keys.
    """

    __slots__ = (
        "_sink", "budget", "headers", "node", "project", "request_id", "subject", "tail", "trace_id"
    )  # fmt: skip

    def __init__(
        self,
        *,
        subject: str,
        tokens: tuple[str, str, str],
        headers: Headers,
        budget: Budget,
        request_id: str,
        trace_id: str = "",
        sink: PartSink | None = None,
    ) -> None:
        self.subject = subject
        self.project, self.node, self.tail = tokens
        self.headers = headers
        self.budget = budget
        self.request_id = request_id
        self.trace_id = trace_id
        self._sink = sink

    @property
    def nonce(self) -> str:
        return self.headers.get(NONCE, "")

    async def send(self, kind: str, data: bytes | Message, headers: Headers | None = None) -> None:
        """One part of the reply stream; the handler's return value ends it."""
        if self._sink is not None:
            payload = data.encode() if isinstance(data, Message) else data
            await self._sink(kind, payload, headers or {})


_CURRENT: ContextVar[Call | None] = ContextVar("dsec_call", default=None)


def current_call() -> Call | None:
    """The call this code runs for, or None outside of any handler."""
    return _CURRENT.get()


def enter_call(call: Call) -> None:
    """Make `call` the current one for the rest of this task's own context."""
    _CURRENT.set(call)


def leave_call() -> None:
    """For work that outlives the handler it was begun in: its budget no longer binds this task."""
    _CURRENT.set(None)


class SubjectTokens:
    """Reads project, node and tail out of subjects made from one template."""

    __slots__ = ("_node", "_project", "_tail")

    def __init__(self, template: str) -> None:
        parts = template.split(".")
        self._project = parts.index("{project}") if "{project}" in parts else -1
        self._node = parts.index("{node}") if "{node}" in parts else -1
        self._tail = parts.index("{tail}") if "{tail}" in parts else -1

    def read(self, subject: str) -> tuple[str, str, str]:
        parts = subject.split(".")
        return (
            parts[self._project] if self._project >= 0 else "",
            parts[self._node] if self._node >= 0 else "",
            ".".join(parts[self._tail :]) if self._tail >= 0 else "",
        )
