"""Asking the burst service which pools a request may go to, and living without it.

It is asked only while the local nodes are loaded, at most once a second per stack of layers. No
answer means the local pool: full nodes then make the request wait, they never lose it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from libdsec.bus import Bus
from libdsec.errors import DSecError
from libdsec.wire import subjects
from libdsec.wire.burst import BurstQuestion
from libdsec.wire.layer import ResolvedLayers
from libdsec.wire.sandbox import SandboxSpec

LOCAL: Final = frozenset({"local"})
ASK_FROM: Final = 0.70  # of local utilisation: below it bursting has ended, whoever is asked
_REMEMBER_S: Final = 1.0
_REMEMBERED: Final = 1024
_ASK_S: Final = 0.25


class Burst:
    """pools() of a request."""

    def __init__(
        self, bus: Bus, *, utilisation: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self._bus = bus
        self._utilisation = utilisation
        self._monotonic = monotonic
        self._known: OrderedDict[tuple[object, ...], tuple[frozenset[str], float]] = OrderedDict()

    async def pools(
        self, project: str, spec: SandboxSpec, layers: ResolvedLayers
    ) -> frozenset[str]:
        if self._utilisation() < ASK_FROM:
            return LOCAL
        digests = tuple(layer.digest for layer in layers.all)
        key = (project, spec.backend, digests)
        known = self._known.get(key)
        if known is not None and known[1] > self._monotonic():
            return known[0]
        question = BurstQuestion(project=project, spec=spec, digests=digests)
        try:
            answer = await self._bus.request(subjects.BURST_ASK, question, budget_s=_ASK_S)
            pools = LOCAL | set(answer.pools)
        except DSecError:
            pools = LOCAL
        self._known[key] = pools, self._monotonic() + _REMEMBER_S
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return pools
