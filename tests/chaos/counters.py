"""Sandboxes that count, and the proof that nothing that happened to the services stopped them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from libdsec import DSecClient, DSecError, Output, Process, Sandbox
from tests.stack import IMAGE, SMALL

INTERVAL_S = 0.5
_SCRIPT = f"i=0; while :; do i=$((i+1)); echo $i; echo $i > /count; sleep {INTERVAL_S}; done"
_PATIENCE_S = 45.0  # for an edge that is being restarted while it is asked
_FOR_EVER_S = 86_400.0


@dataclass
class Counter:
    sandbox: Sandbox
    process: Process
    last: int = 0

    async def check(self) -> str:
        """ "" if it went on since the last look, else what is wrong."""
        try:
            value = await self._value()
        except (DSecError, TimeoutError) as err:
            return f"counter {self.sandbox.id}: {type(err).__name__}: {err}"
        before, self.last = self.last, value
        return "" if value > before else f"counter {self.sandbox.id} stood still at {value}"

    async def output_is_whole(self) -> str:
        """ "" if its output, read again from the start, counts 1, 2, 3… without a gap."""
        again = await self.sandbox.attach(self.process.exec_id)
        text = b""
        async with asyncio.timeout(_PATIENCE_S):
            async for event in again:
                if not isinstance(event, Output):
                    return f"counter {self.sandbox.id} has ended: {event}"
                text += event.data
                if text.count(b"\n") >= self.last:
                    break
        numbers = [int(n) for n in text.split(b"\n")[: self.last]]
        wrong = next((n for n, got in enumerate(numbers, 1) if got != n), None)
        return "" if wrong is None else f"counter {self.sandbox.id}: output breaks at {wrong}"

    async def _value(self) -> int:
        """The file is truncated a moment before it is written: look again then."""
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                text = (await self.sandbox.files.read_text("/count")).strip()
                if text:
                    return int(text)


async def start_counters(client: DSecClient, count: int, label: str) -> list[Counter]:
    made = await client.create_many(
        count, image=IMAGE, **SMALL, labels={"job": label},
        idle_timeout_s=_FOR_EVER_S, max_lifetime_s=_FOR_EVER_S, timeout=120,
    )  # fmt: skip
    counters = []
    for item in made:
        if isinstance(item, DSecError):
            raise item
        process = await item.start(["/bin/sh", "-c", _SCRIPT], stdin=b"", timeout=None)
        counters.append(Counter(item, process))
    return counters


async def check_all(counters: Sequence[Counter]) -> list[str]:
    return [said for said in await asyncio.gather(*(c.check() for c in counters)) if said]


async def outputs_are_whole(counters: Sequence[Counter]) -> list[str]:
    return [said for said in await asyncio.gather(*(c.output_is_whole() for c in counters)) if said]
