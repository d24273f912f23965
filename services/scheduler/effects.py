"""What the placement protocol wants done, as values.

The protocol is written as generators that yield one effect at a time and are resumed with its
result. Whoever drives them (the service over NATS, a test over a simulated network) decides when
and whether it happens. An effect that the bus could not carry out, or whose outcome is unknown,
ends the generator with the exception; the queue delivers the request again.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from libdsec.errors import DSecError
from libdsec.wire.layer import ResolvedLayers
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
from libdsec.wire.sandbox import SandboxSpec

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Effect(Generic[T_co]):
    """Something to do that gives a T."""


Steps = Generator[Effect[Any], Any, T]


def do(effect: Effect[T]) -> Steps[T]:
    """`result = yield from do(effect)`: a yield whose type is known."""
    result: T = yield effect
    return result


@dataclass(frozen=True)
class Stored:
    """A claim as it is in the bucket."""

    claim: Claim
    revision: int


@dataclass(frozen=True)
class ReadClaim(Effect[Stored | None]):
    key: str


@dataclass(frozen=True)
class WriteClaim(Effect[int | None]):
    """Compare-and-set; revision 0 creates. Gives the new revision, None if another was faster."""

    key: str
    claim: Claim
    revision: int


@dataclass(frozen=True)
class ResolveLayers(Effect[ResolvedLayers | DSecError]):
    """The names of a spec as layers; `pinned` are the references they once meant."""

    project: str
    spec: SandboxSpec
    pinned: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChoosePools(Effect[frozenset[str]]):
    """The pools a request may go to; the burst service has a say when the local nodes are full."""

    project: str
    spec: SandboxSpec
    layers: ResolvedLayers


@dataclass(frozen=True)
class MakeOffers(Effect[Mapping[str, OfferReply | None]]):
    """Offer to several nodes at once. None: no answer, so nobody knows what the node has done."""

    offers: Mapping[str, Offer]
    timeout_s: float


@dataclass(frozen=True)
class AskWhoHas(Effect[tuple[Holding, ...]]):
    """Ask all nodes; done when those of `expect` have answered or the timeout is over."""

    ask: WhoHas
    expect: frozenset[str]
    timeout_s: float


@dataclass(frozen=True)
class Tell(Effect[None]):
    """VERDICT, not acknowledged: an edge that misses it will ask."""

    node: str
    verdict: Verdict


@dataclass(frozen=True)
class AnnounceAgain(Effect[frozenset[str]]):
    """ANNOUNCE to several nodes; gives those that agreed."""

    verdicts: Mapping[str, Verdict]
    timeout_s: float


@dataclass(frozen=True)
class Withdraw(Effect[frozenset[str]]):
    """WITHDRAW to several nodes; gives those that agreed."""

    verdicts: Mapping[str, Verdict]
    timeout_s: float


@dataclass(frozen=True)
class Answer(Effect[None]):
    """A message to the waiting caller: the final error, what failed, or why it waits."""

    request: PlaceRequest
    message: DSecError | Announcement | Progress


@dataclass(frozen=True)
class Republish(Effect[None]):
    """Put a request into the queue again; the same id twice is one message."""

    project: str
    request: PlaceRequest
    message_id: str


@dataclass(frozen=True)
class Done:
    """The request needs nothing more from the queue."""


@dataclass(frozen=True)
class Park:
    """Deliver it again after a while."""

    delay_s: float


Outcome = Done | Park
