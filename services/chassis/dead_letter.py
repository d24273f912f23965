"""Messages that nobody could handle: kept in a stream of their own, shown, replayed, discarded.

A dead letter holds the message whole, with its subject and headers, and why it died. Replaying
publishes it as it was, with its budget beginning anew, and removes the letter; both may be repeated
without harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from pydantic import ValidationError

from libdsec.bus import Bus, Call, PubAck, Serving
from libdsec.errors import DSecError, Unavailable
from libdsec.wire import subjects
from libdsec.wire.deadletter import (
    DeadLetter,
    DeadLetterAction,
    DeadLetterListing,
    DeadLetterOutcome,
    DeadLetterQuery,
)
from libdsec.wire.model import random_token

from .clock import Clock
from .pull import Puller
from .stored import delete_message, message_at, stream_state

_DLQ = subjects.DLQ.name
_KEPT_BYTES = 512 << 10  # base64 and headers of a larger one would not fit into a message
_CUT = " (cut: it cannot be replayed)"


async def bury(
    bus: Bus, stream: str, msg: Msg, reason: str, *, clock: Clock, budget_s: float = 5.0
) -> None:
    """Store a delivered message as a dead letter, once however often it is tried."""
    metadata = msg.metadata
    cut = _CUT if len(msg.data) > _KEPT_BYTES else ""
    letter = DeadLetter(
        at=clock.wall_s(),
        subject=msg.subject,
        stream=stream,
        reason=reason + cut,
        deliveries=metadata.num_delivered,
        headers=dict(msg.headers or {}),
        payload=msg.data[:_KEPT_BYTES],
    )
    await bus.stream_publish(
        subjects.DEAD_LETTER,
        letter,
        msg_id=f"{stream}.{metadata.sequence.stream}",
        tail=stream,
        budget_s=budget_s,
    )


class DeadLetters:
    """The queue of the dead, for operators."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def serve(self, queue: str) -> tuple[Serving, ...]:
        """Answer `dsec dlq` on behalf of everyone in the queue group."""
        return (
            await self._bus.serve(subjects.DLQ_LIST, self._listed, queue=queue),
            await self._bus.serve(subjects.DLQ_REPLAY, self._replayed, queue=queue),
            await self._bus.serve(subjects.DLQ_DISCARD, self._discarded, queue=queue),
        )

    async def list(self, limit: int) -> DeadLetterListing:
        """The newest `limit` letters, oldest first, and how many there are."""
        state = await stream_state(self._bus, _DLQ)
        letters: deque[DeadLetter] = deque(maxlen=limit)
        if state["messages"]:
            first = state["last_seq"] - limit - state.get("num_deleted", 0) + 1
            async for letter in self._read(max(first, state["first_seq"]), state["last_seq"]):
                letters.append(letter)
        return DeadLetterListing(letters=tuple(letters), total=state["messages"])

    async def replay(self, seqs: Iterable[int]) -> DeadLetterOutcome:
        """Publish the original messages again and remove the letters."""
        return await _each(seqs, self._replay_one)

    async def discard(self, seqs: Iterable[int]) -> DeadLetterOutcome:
        return await _each(seqs, self._discard_one)

    async def _replay_one(self, seq: int) -> str:
        stored = await message_at(self._bus, _DLQ, seq)
        if stored is None:
            return "there is no such letter"
        letter = DeadLetter.model_validate_json(stored.data)
        if letter.reason.endswith(_CUT):
            return "the payload was cut when it was kept"
        headers = {**_replayable(letter.headers), "Nats-Msg-Id": f"replay.{seq}"}
        answer = await self._bus.ask_server(
            letter.subject, letter.payload, label=subjects.DEAD_LETTER.template, headers=headers
        )
        PubAck.read(answer.data, letter.subject)
        await delete_message(self._bus, _DLQ, seq)
        return ""

    async def _discard_one(self, seq: int) -> str:
        return "" if await delete_message(self._bus, _DLQ, seq) else "there is no such letter"

    async def _read(self, first: int, last: int) -> AsyncIterator[DeadLetter]:
        name = f"dlq-{random_token(8)}"
        config = ConsumerConfig(
            name=name,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=first,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=10,
            mem_storage=True,
            num_replicas=1,
        )
        try:
            await self._bus.nats.jetstream(timeout=5).add_consumer(_DLQ, config)
        except (NatsError, TimeoutError) as err:
            raise Unavailable(f"the dead letters cannot be read: {err}") from err
        seq = 0
        async with Puller(self._bus, _DLQ, name) as puller:
            while seq < last:
                messages = await puller.pull(64, wait_s=0)
                if not messages:
                    return  # the last ones were removed meanwhile
                for msg in messages:
                    seq = msg.metadata.sequence.stream
                    yield _letter(msg.data, seq)

    async def _listed(self, query: DeadLetterQuery, call: Call) -> DeadLetterListing:
        return await self.list(max(1, min(query.limit, 1000)))

    async def _replayed(self, action: DeadLetterAction, call: Call) -> DeadLetterOutcome:
        return await self.replay(action.seqs)

    async def _discarded(self, action: DeadLetterAction, call: Call) -> DeadLetterOutcome:
        return await self.discard(action.seqs)


async def _each(seqs: Iterable[int], act: Callable[[int], Awaitable[str]]) -> DeadLetterOutcome:
    done: list[int] = []
    failed: dict[int, str] = {}
    for seq in seqs:
        try:
            problem = await act(seq)
        except (DSecError, ValidationError) as err:
            problem = str(err)
        if problem:
            failed[seq] = problem
        else:
            done.append(seq)
    return DeadLetterOutcome(done=tuple(done), failed=failed)


def _replayable(headers: dict[str, str]) -> dict[str, str]:
    """The headers without what the first publish told the server about itself."""
    return {
        name: value
        for name, value in headers.items()
        if name == "Nats-TTL" or not name.lower().startswith("nats-")
    }


def _letter(data: bytes, seq: int) -> DeadLetter:
    """One that cannot be read is listed all the same: it can still be discarded."""
    try:
        return DeadLetter.model_validate_json(data).model_copy(update={"seq": seq})
    except ValidationError:
        return DeadLetter(seq=seq, at=0, subject="?", stream="?", reason="unreadable", payload=data)
