"""From the queue to the protocol and back: one consumer per class and capability.

A request that waits goes back undelivered with a delay, so it holds up nobody but those behind it
in the consumer's bound; a message that cannot be read becomes a dead letter and blocks nothing.
"""

from __future__ import annotations

from opentelemetry import trace

from libdsec.errors import DeadlineExceeded, InvalidArgument, Unavailable
from libdsec.wire.ids import check_project
from libdsec.wire.placement import PlaceRequest

from ..chassis.clock import Clock
from ..chassis.delivery import Delivery, Retry
from .attempt import Job
from .claims import digest_of
from .cluster import ClusterState
from .driver import Driver
from .effects import Done, Outcome
from .metrics import SchedulerMetrics
from .protocol import place

AWAY_S = 1.0  # until the next try when the bus or a bucket did not answer

_tracer = trace.get_tracer("dsec.scheduler")


class Lanes:
    """handle() is the consumers' handler."""

    def __init__(
        self, driver: Driver, cluster: ClusterState, clock: Clock, metrics: SchedulerMetrics
    ) -> None:
        self._driver = driver
        self._cluster = cluster
        self._clock = clock
        self._metrics = metrics

    async def handle(self, request: PlaceRequest, delivery: Delivery[PlaceRequest]) -> None:
        """Acknowledged when it returns; Retry: later again; InvalidArgument: dead letter."""
        began_s = self._clock.monotonic_s()
        job = self._job(request, delivery)
        self._record_wait(delivery)
        outcome_name = "unavailable"
        try:
            with _tracer.start_as_current_span("placed") as span:
                span.set_attribute("dsec.items", request.count)
                outcome = await self._driver.run(place(job, self._cluster))
            outcome_name = type(outcome).__name__.lower()
        except (Unavailable, DeadlineExceeded) as err:
            raise Retry(str(err), delay_s=AWAY_S) from err
        finally:
            self._metrics.requests.labels(outcome_name).inc()
            self._metrics.duration.observe(self._clock.monotonic_s() - began_s)
        self._settle(outcome, request, delivery)

    def _job(self, request: PlaceRequest, delivery: Delivery[PlaceRequest]) -> Job:
        project = check_project(delivery.call.project)
        if not request.reply_to.startswith(f"_INBOX.{project}."):
            raise InvalidArgument(
                f"reply_to {request.reply_to[:80]!r} is not an inbox of project {project!r}",
                hint=f"it starts with _INBOX.{project}.",
            )
        return Job(
            project=project,
            request=request,
            digest=digest_of(request),
            deliveries=delivery.attempt,
            deadline=self._cluster.now() + request.budget_ms / 1e3 - delivery.age_s,
            queued_ms=round(1e3 * delivery.age_s, 1),
        )

    def _record_wait(self, delivery: Delivery[PlaceRequest]) -> None:
        """The time in the queue as a span of its own, so that a trace shows it."""
        end_ns = int(1e9 * self._clock.wall_s())
        start_ns = end_ns - int(1e9 * delivery.age_s)
        _tracer.start_span("queued", start_time=start_ns).end(end_ns)

    def _settle(
        self, outcome: Outcome, request: PlaceRequest, delivery: Delivery[PlaceRequest]
    ) -> None:
        if not isinstance(outcome, Done):
            raise Retry("it waits", delay_s=outcome.delay_s)
        self._metrics.queued.observe(delivery.age_s)
