"""A collector gets what it should over OTLP, and a service does not mind when it is away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from libdsec.bus import Bus
from libdsec.errors import Internal

from .echo_process import EchoProcess
from .echo_service import ECHO, Echo
from .servers import NatsServer, free_port


class Collector:
    """The receiving end of OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span.name) for span in scope.spans]

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


async def start(directory: Path, server: NatsServer, port: int, ratio: float = 0.0) -> EchoProcess:
    echo = EchoProcess(directory, server.url)
    echo.environment |= {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "DSEC_TRACE_SAMPLE_RATIO": str(ratio),
    }
    echo.start()
    await echo.until_ready()
    return echo


async def stop(echo: EchoProcess) -> int:
    echo.signal(signal.SIGTERM)
    return await echo.ended()


async def test_sampled_traces_are_sent_before_the_service_ends(
    tmp_path: Path, nats_server: NatsServer, bus: Bus, collector: Collector
) -> None:
    echo = await start(tmp_path, nats_server, collector.server.server_port, ratio=1.0)
    await bus.request(ECHO, Echo(text="x"), budget_s=5, project="p1")
    assert await stop(echo) == 0
    assert ("echo", "think") in collector.spans
    assert ("echo", f"process {ECHO.template}") in collector.spans


async def test_of_unsampled_traces_only_the_failed_are_sent(
    tmp_path: Path, nats_server: NatsServer, bus: Bus, collector: Collector
) -> None:
    echo = await start(tmp_path, nats_server, collector.server.server_port)
    await bus.request(ECHO, Echo(text="fine"), budget_s=5, project="p1")
    with pytest.raises(Internal):
        await bus.request(ECHO, Echo(text="x", hold_s=-1.0), budget_s=5, project="p1")
    await bus.request(ECHO, Echo(text="fine"), budget_s=5, project="p1")
    assert await stop(echo) == 0
    handled = [name for _, name in collector.spans if name == f"process {ECHO.template}"]
    assert len(handled) == 1


async def test_a_collector_that_is_away_costs_nothing_but_spans(
    tmp_path: Path, nats_server: NatsServer, bus: Bus
) -> None:
    echo = await start(tmp_path, nats_server, free_port(), ratio=1.0)
    reply = await bus.request(ECHO, Echo(text="x"), budget_s=5, project="p1")
    assert reply.text == "hello x"
    assert await stop(echo) == 0
