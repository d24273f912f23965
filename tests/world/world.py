"""The small DSec as a whole: a scheduler and its nodes, each with a bus of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from libdsec.bus import Bus
from libdsec.wire.envelope import Rpc

from .edge import Edge
from .scheduler import Scheduler

Connect = Callable[[str], Awaitable[Bus]]


class World:
    """`edges[0]` is node n1; `edge` for tests that need only one."""

    def __init__(self, home: Path, nodes: int = 1) -> None:
        self.edges = [Edge(f"n{number + 1}", home / f"n{number + 1}") for number in range(nodes)]
        self.scheduler = Scheduler(*self.edges)
        self.buses: list[Bus] = []

    @property
    def edge(self) -> Edge:
        return self.edges[0]

    async def start(self, connect: Connect) -> Self:
        for edge in self.edges:
            self.buses.append(await connect(edge.node))
            await edge.serve(self.buses[-1])
        self.buses.append(await connect("scheduler"))
        await self.scheduler.serve(self.buses[-1])
        return self

    async def close(self) -> None:
        for bus in self.buses:
            for serving in bus.servings:
                await serving.stop(timeout_s=0)
        for edge in self.edges:
            await edge.close()


async def replace(world: World, rpc: Rpc[Any, Any], handler: Callable[..., Any]) -> None:
    """Node n1 answers this one request otherwise from now on."""
    for serving in world.buses[0].servings:
        if serving.template == rpc.template:
            await serving.stop()
    await world.buses[0].serve(rpc, handler, project="*", node="n1")
