"""One message on its way in: its call, its span, both current in the task that handles it."""

from __future__ import annotations

from dataclasses import dataclass

from nats.aio.msg import Msg

from ..errors import DSecError
from ..wire.model import random_token
from .call import REQUEST_ID, Call, PartSink, SubjectTokens, enter_call, lowered, stated_budget
from .tracing import NO_HOP, TRACEPARENT, Hop, process_hop


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message being handled. Lifecycle: accept → handle → end."""

    call: Call
    hop: Hop

    def end(self, error: DSecError | None = None) -> None:
        self.hop.end(error)


class Reception:
    """How messages made from one template are taken in.

    Args:
        rooted: a message without trace context begins a trace of its own. Not so for heartbeats and
            the like, which nobody would look for and which would crowd out the rest.
        linked: the span also links to the sender's, as for what may be delivered more than once.
    """

    def __init__(
        self,
        template: str,
        *,
        default_budget_s: float,
        rooted: bool = True,
        linked: bool = False,
    ) -> None:
        self._template = template
        self._tokens = SubjectTokens(template)
        self._default_budget_s = default_budget_s
        self._rooted = rooted
        self._linked = linked

    def call(self, msg: Msg, *, age_s: float = 0.0, sink: PartSink | None = None) -> Call:
        headers = lowered(msg.headers)
        return Call(
            subject=msg.subject,
            tokens=self._tokens.read(msg.subject),
            headers=headers,
            budget=stated_budget(headers, self._default_budget_s, age_s),
            request_id=headers.get(REQUEST_ID) or random_token(),
            sink=sink,
        )

    def enter(self, call: Call) -> Incoming:
        """Make the call and a span for it current; to be called in a task of the message's own."""
        hop = self._hop(call)
        call.trace_id = hop.trace_id
        enter_call(call)
        return Incoming(call, hop)

    def _hop(self, call: Call) -> Hop:
        traceparent = call.headers.get(TRACEPARENT, "")
        if not (traceparent or self._rooted):
            return NO_HOP
        return process_hop(
            self._template,
            call.subject,
            call.request_id,
            traceparent,
            project=call.project,
            link=self._linked,
        )
