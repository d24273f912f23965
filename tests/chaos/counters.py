"""Sandboxes that count, and the proof that nothing that happened to the services stopped them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from libdsec import DSecClient, Process, Sandbox
from tests.stack import IMAGE, SMALL

_SCRIPT = "i=0; while :; do i=$((i+1)); echo $i; echo $i > /count; sleep 0.2; done"


@dataclass
class Counter:
    sandbox: Sandbox
    process: Process
    last: int = 0

    async def check(self) -> str:
        """ "" if it went on since the last look, else what is wrong."""
        try:
            value = int((await self.sandbox.files.read_text("/count")).strip() or 0)
        except Exception as err:  # any error is the finding
            return f"{self.sandbox.id}: {type(err).__name__}: {err}"
        before, self.last = self.last, value
        return "" if value > before else f"{self.sandbox.id} stood still at {value}"

    async def output_is_whole(self) -> str:
        """ "" if its output, read again from the start, counts 1, 2, 3… without a gap."""
        again = await self.sandbox.attach(self.process.exec_id, 0)
        text = b""
        async for event in again:
            data = getattr(event, "data", None)
            if data is None:
                break
            text += data
            if text.count(b"\n") >= self.last:
                break
        numbers = [int(n) for n in text.split()[: self.last]]
        wrong = next((i for i, n in enumerate(numbers, 1) if i != n), None)
        return "" if wrong is None else f"{self.sandbox.id}: output breaks at {wrong}"


async def start_counters(client: DSecClient, count: int) -> list[Counter]:
    made = await client.create_many(
        count, image=IMAGE, **SMALL, labels={"job": "counters"}, idle_timeout_s=86_400
    )
    for item in made:
        if isinstance(item, BaseException):
            raise item
    processes = await asyncio.gather(*(s.start(["/bin/sh", "-c", _SCRIPT]) for s in made))
    return [Counter(s, p) for s, p in zip(made, processes, strict=True)]


async def check_all(counters: list[Counter]) -> list[str]:
    return [said for said in await asyncio.gather(*(c.check() for c in counters)) if said]
