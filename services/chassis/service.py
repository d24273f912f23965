"""A service from start to end: what its `__main__` hands over to.

    settings → telemetry, health → NATS → setup (the service's own) → ready
    SIGTERM → not ready → drain steps → intake ends → work in flight finishes → NATS flushed → out

A second SIGTERM ends the process at once. A task that fails, or a NATS connection that is gone for
good, ends it with a code of its own: whoever supervises it starts it again, and nothing a service
holds in memory is needed for that.

Exit codes: 0 drained, 1 failed while running, 2 wrong settings, 3 could not start.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context
from typing import Any, Generic, TypeVar

import structlog
from nats.micro.service import ServiceConfig

from libdsec.bus import Budget, Bus
from libdsec.errors import DSecError
from libdsec.wire.model import Message

from .clock import Clock
from .consumer import Consumer, Handler
from .discovery import Discovery
from .health import Check, Health, HealthServer, Pulse, View
from .metrics import ServiceMetrics
from .settings import ServiceSettings
from .telemetry import Telemetry
from .version import version

S = TypeVar("S", bound=ServiceSettings)
M = TypeVar("M", bound=Message)
Step = Callable[[], Awaitable[None]]

_CANCEL_S = 2.0


class Service(Generic[S]):
    """What a service's setup is given.

    Attributes:
        bus: connected; what is served through it is drained with the service.
        stack: released last, in reverse, when everything else has ended.
    """

    def __init__(
        self, name: str, settings: S, bus: Bus, metrics: ServiceMetrics, telemetry: Telemetry,
        health: Health, clock: Clock, stack: AsyncExitStack,
    ) -> None:  # fmt: skip
        self.name = name
        self.settings = settings
        self.bus = bus
        self.metrics = metrics
        self.telemetry = telemetry
        self.clock = clock
        self.stack = stack
        self.log: structlog.stdlib.BoundLogger = structlog.get_logger(f"dsec.{name}")
        self._health = health
        self._steps: list[Step] = []
        self._consumers: list[tuple[Consumer[Any], asyncio.Task[None]]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @property
    def draining(self) -> bool:
        return self._health.draining

    def ready_when(self, name: str, check: Check) -> None:
        """Ready only while `check` says so."""
        self._health.checks[name] = check

    def debug(self, name: str, view: View) -> None:
        """Show what `view` returns in /debug/state."""
        self._health.views[name] = view

    def on_drain(self, step: Step) -> None:
        """Do this when draining begins, before intake ends; in the order of registration."""
        self._steps.append(step)

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Run for as long as the service does; its failure is the service's."""
        task = asyncio.create_task(work, name=name, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def consume(
        self, consumer: Consumer[M], handler: Handler[M], *, concurrency: int = 32
    ) -> None:
        """Run a consumer until the drain, which waits for what it has in flight."""
        await self.stack.enter_async_context(consumer)
        name = f"consume {consumer.durable.name}"
        work = consumer.run(handler, concurrency=concurrency)
        self._consumers.append((consumer, self.spawn(work, name=name)))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (err := task.exception()) is not None:
            self.log.error("task failed", task=task.get_name(), exc_info=err)
            if not self._failure.done():
                self._failure.set_result(err)

    async def until_over(self, stop: asyncio.Event) -> int:
        """Wait for the end; the exit code says which one it was."""
        asked = asyncio.ensure_future(stop.wait())
        closed = asyncio.ensure_future(self.bus.wait_closed())
        ends: set[asyncio.Future[Any]] = {asked, closed, self._failure}
        done, rest = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in rest:
            end.cancel()
        code = 0 if done == {asked} else 1
        self.log.info("ending", code=code, connected=self.bus.ready)
        return code

    async def drain(self) -> None:
        """Finish in order; whatever goes wrong in one step does not stop the next."""
        self._health.draining = True
        budget = Budget(self.settings.drain_timeout_s)
        for step in self._steps:
            await self._attempt("drain step", step(), budget)
        for consumer, _ in self._consumers:
            consumer.stop()
        consuming = [task for _, task in self._consumers if not task.done()]
        stops = [s.stop(timeout_s=budget.remaining_s) for s in self.bus.servings]
        await self._attempt("servings", asyncio.gather(*stops), budget)
        if consuming:
            await asyncio.wait(consuming, timeout=budget.remaining_s)
        await self.cancel_tasks()
        await self._attempt("bus", self.bus.drain(timeout_s=_CANCEL_S), Budget(2 * _CANCEL_S))

    async def cancel_tasks(self) -> None:
        """End what was spawned; a task that does not listen is left behind after a moment."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_S)

    async def _attempt(self, what: str, work: Awaitable[Any], budget: Budget) -> None:
        try:
            async with asyncio.timeout(max(0.1, budget.remaining_s)):
                await work
        except Exception:
            self.log.exception("%s failed while draining", what)


@asynccontextmanager
async def started(
    name: str, settings: S, *, identity: str = "", clock: Clock | None = None
) -> AsyncIterator[Service[S]]:
    """A service that is connected and observable, with nothing of its own yet.

    Raises:
        DSecError: NATS is not there or refuses us.
        OSError: the HTTP port is taken.
    """
    clock = clock or Clock()
    metrics = ServiceMetrics(name)
    pulse = Pulse(clock, settings.loop_lag_limit_s, metrics.loop_lag.set)
    health = Health(metrics.registry, pulse)
    async with AsyncExitStack() as outer:
        telemetry = Telemetry.start(name, settings, metrics)
        outer.callback(telemetry.shutdown)
        server = HealthServer(health)
        port = await server.start(settings.http_host, settings.http_port)
        outer.push_async_callback(server.stop)
        bus = await _connect(name, settings, identity, metrics)
        outer.push_async_callback(bus.close)
        health.checks["nats"] = lambda: bus.ready
        health.views["bus"] = functools.partial(_bus_state, bus)
        stack = await outer.enter_async_context(AsyncExitStack())
        service = Service(name, settings, bus, metrics, telemetry, health, clock, stack)
        outer.push_async_callback(service.cancel_tasks)
        service.spawn(pulse.beat(), name="pulse")
        await telemetry.serve(bus)
        await _announce(name, settings, bus)
        service.log.info("started", http_port=port, settings=settings.redacted())
        if settings.http_port_file is not None:
            settings.http_port_file.write_text(str(port))
        yield service


async def _connect(
    name: str, settings: ServiceSettings, identity: str, metrics: ServiceMetrics
) -> Bus:
    user = settings.nats_user or name
    scope = f"node.{settings.node}" if settings.node else "service"
    return await Bus.connect(
        settings.nats_servers,
        name=f"{name}.{settings.node or settings.instance}",
        identity=identity,
        user=settings.nats_user or None,
        password=settings.password(),
        creds=settings.nats_creds,
        inbox_prefix=settings.nats_inbox_prefix or f"_INBOX.{scope}.{user}",
        connect_timeout_s=settings.nats_connect_timeout_s,
        observer=metrics.bus,
    )


async def _announce(name: str, settings: ServiceSettings, bus: Bus) -> None:
    metadata = {"instance": settings.instance} | ({"node": settings.node} if settings.node else {})
    config = ServiceConfig(
        name=name, version=version(), description=f"DSec {name}", metadata=metadata
    )
    await Discovery(bus, config).start()


def _bus_state(bus: Bus) -> dict[str, object]:
    return {
        "connected": bus.ready,
        "server": str(bus.nats.connected_url.netloc) if bus.nats.connected_url else None,
        "in_flight": {serving.subject: serving.in_flight for serving in bus.servings},
    }


async def serve(
    name: str,
    settings: S,
    setup: Callable[[Service[S]], Awaitable[None]],
    stop: asyncio.Event,
    *,
    identity: str = "",
) -> int:
    """Start, set up, run until `stop` or a failure, drain; returns the exit code."""
    log = structlog.get_logger(f"dsec.{name}")
    ready = False
    try:
        async with started(name, settings, identity=identity) as service:
            service.ready_when("set up", lambda: ready)
            await setup(service)
            ready = True
            code = await service.until_over(stop)
            await service.drain()
            return code
    except (DSecError, OSError) as err:
        log.error("cannot start" if not ready else "ended badly", error=str(err))
        return 1 if ready else 3
