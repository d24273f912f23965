"""Carries out over the bus what the placement protocol asks for.

An outcome that is not known ends the protocol's steps with Unavailable: the queue delivers the
request again, and the claim says how far it had come. What an edge or a caller may miss without
harm (a verdict, progress) is sent once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import structlog
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from libdsec.bus import Bus, NobodyListens
from libdsec.errors import AlreadyExists, Conflict, DSecError, InvalidArgument, Unavailable
from libdsec.wire import subjects
from libdsec.wire.envelope import Rpc
from libdsec.wire.error import ErrorReply
from libdsec.wire.model import Empty
from libdsec.wire.placement import (
    Announcement,
    Claim,
    Holding,
    Offer,
    OfferReply,
    PlaceRequest,
    Progress,
    Verdict,
    WhoHas,
)

from ..chassis.kv import KeyValue
from .burst import Burst
from .effects import (
    AnnounceAgain,
    Answer,
    AskWhoHas,
    ChoosePools,
    Effect,
    MakeOffers,
    ReadClaim,
    Republish,
    ResolveLayers,
    Steps,
    Stored,
    Tell,
    Withdraw,
    WriteClaim,
)
from .layers import Layers

T = TypeVar("T")

KIND_ANNOUNCE = "announce"
KIND_PROGRESS = "progress"

_log = structlog.get_logger("scheduler.driver")


class Driver:
    """run() drives a protocol's steps to their end."""

    def __init__(self, bus: Bus, layers: Layers, burst: Burst) -> None:
        self._bus = bus
        self._layers = layers
        self._burst = burst
        self._claims: KeyValue[Claim] = KeyValue(bus, subjects.CLAIMS)

    async def run(self, steps: Steps[T]) -> T:
        """Raises Unavailable or DeadlineExceeded when the bus does not let it go on."""
        result: object = None
        while True:
            try:
                effect = steps.send(result)
            except StopIteration as stop:
                end: T = stop.value
                return end
            try:
                result = await self._carry_out(effect)
            except BaseException:
                steps.close()
                raise

    async def _carry_out(self, effect: Effect[Any]) -> object:
        match effect:
            case WriteClaim(key, claim, revision):
                return await self._write(key, claim, revision)
            case ReadClaim(key):
                entry = await self._claims.get(key)
                return Stored(entry.value, entry.revision) if entry is not None else None
            case ResolveLayers(project, spec, pinned):
                return await self._layers.resolve(project, spec, pinned)
            case ChoosePools(project, spec, layers):
                return await self._burst.pools(project, spec, layers)
            case MakeOffers(offers, timeout_s):
                return await self._offer_all(offers, timeout_s)
            case Tell(node, verdict):
                await self._tell(node, verdict)
            case Answer(request, message):
                await self._answer(request, message)
            case AskWhoHas(ask, expect, timeout_s):
                return await self._who_has(ask, expect, timeout_s)
            case AnnounceAgain(verdicts, timeout_s):
                return await self._agreed(subjects.ANNOUNCE, verdicts, timeout_s)
            case Withdraw(verdicts, timeout_s):
                return await self._agreed(subjects.WITHDRAW, verdicts, timeout_s)
            case Republish(project, request, message_id):
                await self._republish(project, request, message_id)
            case _:
                raise AssertionError(f"unknown effect {effect}")
        return None

    async def _write(self, key: str, claim: Claim, revision: int) -> int | None:
        try:
            if revision == 0:
                return await self._claims.create(key, claim)
            return await self._claims.update(key, claim, revision)
        except (AlreadyExists, Conflict):
            return None

    async def _offer_all(
        self, offers: Mapping[str, Offer], timeout_s: float
    ) -> Mapping[str, OfferReply | None]:
        if len(offers) == 1:  # by far the most frequent case needs no tasks
            ((node, offer),) = offers.items()
            return {node: await self._offer(node, offer, timeout_s)}
        async with asyncio.TaskGroup() as group:
            tasks = {
                node: group.create_task(self._offer(node, offer, timeout_s))
                for node, offer in offers.items()
            }
        return {node: task.result() for node, task in tasks.items()}

    async def _offer(self, node: str, offer: Offer, timeout_s: float) -> OfferReply | None:
        """None: the node may or may not have accepted."""
        try:
            return await self._bus.request(subjects.OFFER, offer, node=node, budget_s=timeout_s)
        except (NobodyListens, InvalidArgument) as err:
            return OfferReply(refused=ErrorReply.of(err), session=offer.session)
        except DSecError as err:
            _log.info("offer unanswered", node=node, request=offer.request_id, error=str(err))
            return None

    async def _tell(self, node: str, verdict: Verdict) -> None:
        try:
            await self._bus.publish(subjects.VERDICT, verdict, node=node)
        except Unavailable:
            return  # the edge asks a second later

    async def _answer(
        self, request: PlaceRequest, message: DSecError | Announcement | Progress
    ) -> None:
        try:
            if isinstance(message, DSecError):
                trace.get_current_span().set_status(StatusCode.ERROR, str(message))
                message.request_id = request.request_id
                await self._bus.send_error(request.reply_to, message, nonce=request.nonce)
            else:
                kind = KIND_PROGRESS if isinstance(message, Progress) else KIND_ANNOUNCE
                await self._bus.send(request.reply_to, kind, message, nonce=request.nonce)
        except InvalidArgument as err:
            _log.warning("nobody to answer to", request=request.request_id, error=str(err))

    async def _who_has(
        self, ask: WhoHas, expect: frozenset[str], timeout_s: float
    ) -> tuple[Holding, ...]:
        if not expect:
            return ()
        try:
            gathered = await self._bus.gather(
                subjects.WHOHAS, ask, timeout_s=timeout_s, expect=expect
            )
        except NobodyListens:
            return ()
        return tuple(gathered.replies.values())

    async def _agreed(
        self, rpc: Rpc[Verdict, Empty], verdicts: Mapping[str, Verdict], timeout_s: float
    ) -> frozenset[str]:
        async with asyncio.TaskGroup() as group:
            tasks = {
                node: group.create_task(self._agrees(rpc, node, verdict, timeout_s))
                for node, verdict in verdicts.items()
            }
        return frozenset(node for node, task in tasks.items() if task.result())

    async def _agrees(
        self, rpc: Rpc[Verdict, Empty], node: str, verdict: Verdict, timeout_s: float
    ) -> bool:
        try:
            await self._bus.request(rpc, verdict, node=node, budget_s=timeout_s)
        except DSecError as err:
            _log.info("node did not agree", node=node, request=verdict.request_id, error=str(err))
            return False
        return True

    async def _republish(self, project: str, request: PlaceRequest, message_id: str) -> None:
        tail = subjects.lane_tail(project, request.spec.qos, request.spec.backend)
        await self._bus.stream_publish(
            subjects.PLACE,
            request,
            project=project,
            tail=tail,
            msg_id=message_id,
            ttl_s=request.budget_ms / 1e3,
            request_id=request.request_id,
        )
