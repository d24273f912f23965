"""The burst service's verbs, and its ear for heartbeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from libdsec.bus import Call
from libdsec.wire.burst import BurstAnswer, BurstQuestion, BurstStatus
from libdsec.wire.defaults import LEASE_S
from libdsec.wire.model import Empty
from libdsec.wire.node import Heartbeat

from .eligibility import CloudRules, may_leave
from .metrics import BurstMetrics
from .utilisation import LOCAL, Fleet, Hysteresis


@dataclass
class Burst:
    """What one replica knows, all of it from the last seconds' heartbeats."""

    rules: CloudRules
    switch: Hysteresis
    enabled: bool
    pool: str
    now_s: Callable[[], float]
    metrics: BurstMetrics
    fleet: Fleet = field(default_factory=Fleet)

    async def on_heartbeat(self, beat: Heartbeat, call: Call) -> None:
        now = self.now_s()
        self.fleet.hear(beat, now)
        self.fleet.forget_silent(now, LEASE_S)
        self.metrics.utilisation.set(self._utilisation())

    async def ask(self, question: BurstQuestion, call: Call) -> BurstAnswer:
        """Which pools a request may be placed in now."""
        utilisation = self._utilisation()
        ruling = may_leave(question, self.rules)
        reason = self._held_back() or ruling.reason
        leaves = ruling.eligible and not self._held_back()
        self.metrics.answers.labels("cloud" if leaves else "local").inc()
        return BurstAnswer(
            pools=(LOCAL, self.pool) if leaves else (LOCAL,),
            eligible=ruling.eligible,
            utilisation=utilisation,
            bursting=self.switch.on,
            reason=reason,
        )

    async def status(self, message: Empty, call: Call) -> BurstStatus:
        return BurstStatus(
            utilisation=self._utilisation(),
            bursting=self.switch.on,
            enabled=self.enabled,
            synced_layers=len(self.rules.synced),
        )

    def _utilisation(self) -> float:
        value = self.fleet.utilisation(self.now_s())
        self.switch.feed(value)
        return value

    def _held_back(self) -> str:
        """Why nothing leaves now, whatever it is; "" if something may."""
        if not self.enabled:
            return "burst is switched off"
        if not self.switch.on:
            return f"utilisation is below {self.switch.start:.2f}"
        if self.pool not in self.fleet.pools(self.now_s()):
            return f"no node of the pool {self.pool} is there"
        return ""
