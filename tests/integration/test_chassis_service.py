"""The skeleton of a service as an operator meets it: a process, its ports and its signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libdsec.bus import Bus, Call
from libdsec.errors import Unavailable
from libdsec.wire import subjects
from libdsec.wire.model import Empty
from libdsec.wire.trace import TraceQuery

from .conftest import Connect
from .echo_process import ROOT, EchoProcess
from .echo_service import CRASH, DONE, ECHO, HANG_UP, JOB, Echo
from .servers import NatsServer, free_port

USERS = "authorization { users = [{ user: echo, password: pw }] }"


@pytest.fixture
def echo(tmp_path: Path, nats_server: NatsServer) -> Iterator[EchoProcess]:
    service = EchoProcess(tmp_path, nats_server.url)
    service.start()
    yield service
    assert service.process is not None
    service.process.kill()
    service.process.wait(5)


async def ask(bus: Bus, text: str, **options: Any) -> str:
    hold_s = options.pop("hold_s", 0.0)
    reply = await bus.request(
        ECHO, Echo(text=text, hold_s=hold_s), budget_s=10, project="p1", **options
    )
    return reply.text


async def test_it_says_what_it_is_and_how_it_is(echo: EchoProcess, bus: Bus) -> None:
    await echo.until_ready()
    assert await ask(bus, "world") == "hello world"
    assert (await echo.get("/healthz"))[0] == 200
    status, ready = await echo.get("/readyz")
    assert (status, json.loads(ready)["checks"]) == (
        200, {"not draining": True, "nats": True, "set up": True},
    )  # fmt: skip
    _, metrics = await echo.get("/metrics")
    assert (
        'dsec_bus_messages_total{direction="handled",outcome="ok",'
        'subject_template="t.p.{project}.echo"} 1.0' in metrics
    )
    assert "dsec_build_info" in metrics
    assert "process_resident_memory_bytes" in metrics
    _, state = await echo.get("/debug/state")
    assert json.loads(state)["greeting"] == "hello"
    assert (await echo.get("/nothing"))[0] == 404


async def test_the_network_tool_finds_it(echo: EchoProcess, bus: Bus) -> None:
    await echo.until_ready()
    await ask(bus, "world")
    info = json.loads((await bus.nats.request("$SRV.INFO.echo", timeout=5)).data)
    assert "t.p.*.echo" in {endpoint["subject"] for endpoint in info["endpoints"]}
    stats = json.loads((await bus.nats.request("$SRV.STATS.echo", timeout=5)).data)
    (requests,) = [
        endpoint["num_requests"]
        for endpoint in stats["endpoints"]
        if endpoint["subject"] == "t.p.*.echo"
    ]
    assert requests == 1


async def test_a_request_is_found_in_its_trace_and_in_its_log(echo: EchoProcess, bus: Bus) -> None:
    await echo.until_ready()
    await ask(bus, "world", request_id="r-find-me")
    query = TraceQuery(request_id="r-find-me")
    async with asyncio.timeout(5):
        answer = await bus.gather(
            subjects.TRACE, query, timeout_s=5, project="p1", expect=[await identity(bus)]
        )
    ((_, spans),) = answer.replies.items()
    assert spans.service == "echo"
    by_name = {span.name: span for span in spans.spans}
    handled, thought = by_name["process t.p.{project}.echo"], by_name["think"]
    assert thought.parent_id == handled.span_id
    assert handled.attributes["dsec.project"] == "p1"
    (line,) = [line for line in echo.logged() if line["event"] == "echoing"]
    assert line["request_id"] == "r-find-me"
    assert line["trace_id"] == thought.trace_id
    assert line["span_id"] == thought.span_id
    assert line["service"] == "echo"
    elsewhere = await bus.gather(subjects.TRACE, query, timeout_s=0.3, project="p2")
    assert all(
        "dsec.project" not in span.attributes
        for each in elsewhere.replies.values()
        for span in each.spans
    )


async def identity(bus: Bus) -> str:
    ping = json.loads((await bus.nats.request("$SRV.PING.echo", timeout=5)).data)
    return f"echo.{ping['metadata']['instance']}"


async def test_sigterm_finishes_what_is_in_flight_and_ends_well(
    echo: EchoProcess, bus: Bus
) -> None:
    await echo.until_ready()
    done: asyncio.Queue[str] = asyncio.Queue()

    async def note(event: Echo, call: Call) -> None:
        done.put_nowait(event.text)

    await bus.subscribe(DONE, note, concurrency=1)
    await bus.stream_publish(JOB, Echo(text="job", hold_s=0.6), msg_id="1")
    running = asyncio.create_task(ask(bus, "slow", hold_s=0.6))
    async with asyncio.timeout(5):
        while '"t.p.*.echo": 1' not in (await echo.get("/debug/state"))[1]:
            await asyncio.sleep(0.01)
    echo.signal(signal.SIGTERM)
    await echo.until_ready(False)
    assert await asyncio.wait_for(done.get(), 5) == "draining"

    async def until_refused() -> None:
        while True:
            await ask(bus, "too late")

    with pytest.raises(Unavailable, match="nobody answers"):
        await until_refused()
    await bus.stream_publish(JOB, Echo(text="for the next"), msg_id="2")
    assert await running == "hello slow"
    assert await asyncio.wait_for(done.get(), 5) == "job"
    assert await echo.ended() == 0
    left = await bus.nats.jetstream().get_last_msg("JOBS", "t.job")
    assert Echo.model_validate_json(left.data or b"").text == "for the next"
    assert (await bus.nats.jetstream().stream_info("JOBS")).state.messages == 1


async def test_work_that_outlasts_the_drain_is_cut_off(echo: EchoProcess, bus: Bus) -> None:
    echo.process.kill()  # type: ignore[union-attr]
    await echo.ended()
    echo.port_file.unlink(missing_ok=True)
    echo.environment["DSEC_DRAIN_TIMEOUT_S"] = "0.3"
    echo.start()
    await echo.until_ready()
    running = asyncio.create_task(ask(bus, "endless", hold_s=60))
    async with asyncio.timeout(5):
        while '"t.p.*.echo": 1' not in (await echo.get("/debug/state"))[1]:
            await asyncio.sleep(0.01)
    began = time.monotonic()
    echo.signal(signal.SIGTERM)
    with pytest.raises(Unavailable, match="stopping"):
        await running
    assert await echo.ended() == 0
    assert time.monotonic() - began < 5


async def test_a_second_sigterm_ends_it_at_once(echo: EchoProcess, bus: Bus) -> None:
    await echo.until_ready()
    running = asyncio.create_task(ask(bus, "slow", hold_s=4))
    async with asyncio.timeout(5):
        while '"t.p.*.echo": 1' not in (await echo.get("/debug/state"))[1]:
            await asyncio.sleep(0.01)
    echo.signal(signal.SIGTERM)
    await echo.until_ready(False)
    began = time.monotonic()
    echo.signal(signal.SIGTERM)
    assert await echo.ended() == 130
    assert time.monotonic() - began < 2
    running.cancel()


async def test_a_failing_task_ends_the_service(echo: EchoProcess, bus: Bus) -> None:
    await echo.until_ready()
    await bus.request(CRASH, Empty(), budget_s=5)
    assert await echo.ended() == 1
    assert any("a task of ours has failed" in str(line) for line in echo.logged())


async def test_a_connection_that_is_gone_for_good_ends_the_service(
    echo: EchoProcess, bus: Bus
) -> None:
    await echo.until_ready()
    await bus.request(HANG_UP, Empty(), budget_s=5)
    assert await echo.ended() == 1


@pytest.mark.parametrize("nats_config", [USERS])
async def test_revoked_credentials_make_it_unready_until_they_are_good_again(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    service = EchoProcess(tmp_path, nats_server.url)
    service.environment |= {"DSEC_NATS_USER": "echo", "DSEC_NATS_PASSWORD": "pw"}
    service.start()
    try:
        await service.until_ready()
        nats_server.reconfigure(USERS.replace("echo", "somebody-else"))
        await service.until_ready(False)
        async with asyncio.timeout(10):
            while not any("refused the credentials" in str(line) for line in service.logged()):
                await asyncio.sleep(0.05)
        nats_server.reconfigure(USERS)
        await service.until_ready()
    finally:
        service.signal(signal.SIGKILL)
        await service.ended()


async def test_it_is_not_ready_while_the_server_is_away_and_ready_again_after(
    echo: EchoProcess, nats_server: NatsServer, connect: Connect
) -> None:
    await echo.until_ready()
    nats_server.kill()
    await echo.until_ready(False)
    assert (await echo.get("/healthz"))[0] == 200  # restarting it would not help
    nats_server.start()
    await echo.until_ready()
    assert await ask(await connect("later"), "again") == "hello again"
    assert "dsec_bus_reconnects_total 1.0" in (await echo.get("/metrics"))[1]


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.integration.echo_service", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip


def test_its_configuration_can_be_shown_without_its_secrets() -> None:
    shown = start(
        "--print-config", DSEC_NATS_PASSWORD="hunter2", DSEC_REDIS_URL="redis://:hunter2@r:1/0",
        DSEC_NATS_SERVERS='["nats://me:hunter2@n:1"]', DSEC_GREETING="hi",
    )  # fmt: skip
    assert shown.returncode == 0
    assert "hunter2" not in shown.stdout
    values = json.loads(shown.stdout)
    assert values["greeting"] == "hi"
    assert values["http_port"] == 9464
    assert values["nats_servers"] == ["nats://***@n:1"]
    assert "DSEC_GREETING" in start("--help").stdout


def test_wrong_settings_are_named_and_end_it() -> None:
    failed = start("--check-config", DSEC_HTTP_PORT="many", DSEC_DRAIN_TIMEOUT_S="-1")
    assert failed.returncode == 2
    assert "DSEC_HTTP_PORT: " in failed.stderr
    assert "DSEC_DRAIN_TIMEOUT_S: " in failed.stderr
    bare = start("--check-config", DSEC_NATS_SERVERS="nats://n:1")
    assert (bare.returncode, "DSEC_NATS_SERVERS: not the JSON" in bare.stderr) == (2, True)
    both = start("--check-config", DSEC_NATS_PASSWORD="a", DSEC_NATS_PASSWORD_FILE="/b")
    assert both.returncode == 2
    assert "give DSEC_NATS_PASSWORD or DSEC_NATS_PASSWORD_FILE" in both.stderr
    assert start("--check-config").returncode == 0


def test_without_a_server_it_says_so_and_ends() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    failed = start(
        DSEC_NATS_SERVERS=json.dumps([url]), DSEC_NATS_CONNECT_TIMEOUT_S="0.5", DSEC_HTTP_PORT="0"
    )
    assert failed.returncode == 3
    line = json.loads(failed.stderr.splitlines()[-1])
    assert line["event"] == "cannot start"
    assert url in line["error"]
