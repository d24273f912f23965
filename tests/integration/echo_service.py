"""A small service on the chassis, run as a process by the tests of the skeleton."""

from __future__ import annotations

import asyncio

from opentelemetry import trace
from pydantic import Field

from libdsec.bus import Call
from libdsec.wire.envelope import Durable, Event, Rpc, Stream
from libdsec.wire.model import Empty, Message
from services.chassis.consumer import Consumer
from services.chassis.delivery import Delivery
from services.chassis.run import run
from services.chassis.service import Service
from services.chassis.settings import ServiceSettings
from services.chassis.topology import ensure_topology


class Echo(Message):
    text: str
    hold_s: float = 0.0


ECHO = Rpc("t.p.{project}.echo", Echo, Echo, "the echo service")
CRASH = Rpc("t.crash", Empty, Empty, "the echo service")
HANG_UP = Rpc("t.hang_up", Empty, Empty, "the echo service")
JOB = Event("t.job", Echo)
DONE = Event("t.done", Echo)
JOBS = Stream(
    "JOBS", ("t.job",), work_queue=True, max_age_s=600, max_bytes=1 << 20, max_msgs=100,
    discard_new=True,
)  # fmt: skip
WORKER = Durable("worker", JOBS, "t.job", 30, 3, 16)


class EchoSettings(ServiceSettings):
    greeting: str = Field("hello", description="what it begins with")


async def set_up(service: Service[EchoSettings]) -> None:
    async def echo(request: Echo, call: Call) -> Echo:
        with trace.get_tracer("echo").start_as_current_span("think"):
            service.log.info("echoing")
            if request.hold_s < 0:
                raise ValueError("time does not run backwards")
            await asyncio.sleep(request.hold_s)
        return Echo(text=f"{service.settings.greeting} {request.text}")

    async def crash(request: Empty, call: Call) -> Empty:
        async def fail() -> None:
            raise RuntimeError("a task of ours has failed")

        service.spawn(fail(), name="doomed")
        return Empty()

    async def hang_up(request: Empty, call: Call) -> Empty:
        async def close_after_the_answer() -> None:
            await service.bus.flush()
            await service.bus.close()

        service.spawn(close_after_the_answer(), name="hang up")
        return Empty()

    async def work(job: Echo, delivery: Delivery[Echo]) -> None:
        await asyncio.sleep(job.hold_s)
        await service.bus.publish(DONE, job)

    async def say_goodbye() -> None:
        await service.bus.publish(DONE, Echo(text="draining"))

    await ensure_topology(service.bus, streams=[JOBS], durables=[WORKER])
    await service.bus.serve(ECHO, echo, queue="echo")
    await service.bus.serve(CRASH, crash)
    await service.bus.serve(HANG_UP, hang_up)
    consumer = Consumer(service.bus, WORKER, JOB, observer=service.metrics.consumer)
    await service.consume(consumer, work)
    service.on_drain(say_goodbye)
    service.debug("greeting", lambda: service.settings.greeting)


if __name__ == "__main__":
    run("echo", EchoSettings, set_up)
