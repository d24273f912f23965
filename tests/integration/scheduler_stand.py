"""Schedulers as processes, NATS and Valkey as processes, simulated edges, and a caller."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.simulated_edge import SimulatedEdge
from libdsec.bus import Bus
from libdsec.errors import DeadlineExceeded, DSecError, Unavailable
from libdsec.wire import subjects
from libdsec.wire.error import ErrorReply
from libdsec.wire.layer import LayerInfo, LayerKind, layer_key, newest_key
from libdsec.wire.model import Empty, random_token
from libdsec.wire.node import NodeListing, NodeState
from libdsec.wire.placement import Announcement, CancelRequest, PlaceRequest, Progress
from libdsec.wire.sandbox import SandboxSpec
from services.chassis.kv import KeyValue
from services.chassis.topology import ensure_topology

from .servers import START_DEADLINE_S, NatsServer, ServerProcess, Valkey

PROJECT = "team"
ROOT = Path(__file__).parents[2]


class ServiceProcess(ServerProcess):
    """One service, as it runs in production; a scheduler unless it is told otherwise."""

    def __init__(
        self, directory: Path, nats: NatsServer, valkey: Valkey, module: str = "scheduler",
        **env: str,
    ) -> None:  # fmt: skip
        super().__init__(directory)
        self._module = module
        self._env = {
            "DSEC_NATS_SERVERS": json.dumps([nats.url]),
            "DSEC_REDIS_URL": valkey.url,
            "DSEC_HTTP_PORT": str(self.port),
            "DSEC_LOG_FORMAT": "console",
            **env,
        }

    def argv(self) -> list[str]:
        return [sys.executable, "-m", f"services.{self._module}"]

    def launch(self) -> ServiceProcess:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.argv(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT,
                env={**os.environ, **self._env},
            )  # fmt: skip
        return self

    async def ready(self) -> None:
        await until(lambda: self.check("/readyz") == 200, what=self.log_tail)

    def check(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=1) as got:
                return int(got.status)
        except urllib.error.HTTPError as err:
            return int(err.code)
        except OSError:
            return 0


async def until(
    fact: Callable[[], Any], *, within_s: float = START_DEADLINE_S, what: Any = "it"
) -> None:
    """Wait for a fact; the deadline is for when it never becomes true."""
    end = time.monotonic() + within_s
    while True:
        got = fact()
        if isinstance(got, Awaitable):
            got = await got
        if got:
            return
        assert time.monotonic() < end, (
            f"not within {within_s} s: {what() if callable(what) else what}"
        )
        await asyncio.sleep(0.05)


@dataclass
class Answer:
    """What a caller has heard of one request."""

    request_id: str
    key: str
    ready: dict[int, str] = field(default_factory=dict)
    failed: dict[int, ErrorReply] = field(default_factory=dict)
    error: DSecError | None = None
    progress: list[Progress] = field(default_factory=list)
    twice: list[tuple[int, str, str]] = field(default_factory=list)


class Stand:
    def __init__(
        self,
        directory: Path,
        nats: NatsServer,
        valkey: Valkey,
        connect: Callable[..., Awaitable[Bus]],
    ) -> None:
        self.directory = directory
        self.nats = nats
        self.valkey = valkey
        self.connect = connect
        self.schedulers: list[ServiceProcess] = []
        self.edges: dict[str, SimulatedEdge] = {}
        self.caller: Bus
        self.burst: ServiceProcess | None = None

    async def open(self, *, schedulers: int = 1, edges: int = 2, **edge: Any) -> None:
        self.caller = await self.connect("caller", inbox_prefix=f"_INBOX.{PROJECT}.caller")
        await ensure_topology(
            self.caller, streams=subjects.STREAMS, durables=subjects.LANES.values(),
            buckets=subjects.BUCKETS,
        )  # fmt: skip
        await self.publish_layer("base", "1")
        for _ in range(schedulers):
            self.add_scheduler()
        for number in range(edges):
            await self.add_edge(f"n{number}", **edge)
        for scheduler in self.schedulers:
            await scheduler.ready()
        await until(self.all_live, what="all nodes live")

    def add_scheduler(self) -> ServiceProcess:
        place = self.directory / f"scheduler{len(self.schedulers)}"
        self.schedulers.append(ServiceProcess(place, self.nats, self.valkey).launch())
        return self.schedulers[-1]

    async def add_burst(self, synced: str) -> None:
        (self.directory / "synced").write_text(synced)
        self.burst = ServiceProcess(
            self.directory / "burst", self.nats, self.valkey, "burst",
            DSEC_BURST_SYNCED_FILE=str(self.directory / "synced"),
        ).launch()  # fmt: skip
        await self.burst.ready()

    async def add_edge(self, node: str, **options: Any) -> SimulatedEdge:
        bus = await self.connect(node, identity=node, inbox_prefix=f"_INBOX.node.{node}")
        edge = SimulatedEdge(bus, node, heartbeat_s=0.25, **options)
        edge.keep_offers = True
        self.edges[node] = edge
        await edge.start()
        return edge

    async def close(self) -> None:
        for edge in self.edges.values():
            await edge.crash()
        for process in (*self.schedulers, *([self.burst] if self.burst else [])):
            process.terminate()

    async def publish_layer(self, name: str, version: str) -> None:
        layer = LayerInfo(
            space="public", name=name, version=version, digest=f"{name}-{version}",
            kind=LayerKind.BASE, size_bytes=1, files=1, created_at=0.0,
        )  # fmt: skip
        kv: KeyValue[LayerInfo] = KeyValue(self.caller, subjects.LAYERS)
        await kv.create(layer_key("public", name, version), layer)
        await kv.put(newest_key("public", name), layer)

    async def nodes(self) -> NodeListing:
        return await self.caller.request(subjects.NODES, Empty(), project=PROJECT, budget_s=2)

    async def all_live(self) -> bool:
        """Every scheduler sees every edge; each asks one of them, so ask until all have said it."""
        try:
            for _ in range(4 * len(self.schedulers)):
                views = (await self.nodes()).nodes
                live = {v.heartbeat.node for v in views if v.state is NodeState.LIVE}
                if live != set(self.edges):
                    return False
        except DSecError:
            return False
        return True

    async def create(
        self,
        key: str = "",
        *,
        count: int = 1,
        budget_s: float = 10.0,
        spec: SandboxSpec | None = None,
        request_id: str = "",
        project: str = PROJECT,
        settled: Callable[[Answer], bool] | None = None,
    ) -> Answer:
        """Publish a request and listen until every item has its answer, or the budget is over."""
        spec = spec or SandboxSpec(image="base@1")
        answer = Answer(request_id or random_token(), key or random_token())
        end = time.monotonic() + budget_s
        async with self.caller.inbox(limit=4096) as inbox:
            request = PlaceRequest(
                request_id=answer.request_id, key=answer.key, reply_to=inbox.subject,
                nonce=inbox.nonce, count=count, budget_ms=int(budget_s * 1e3), spec=spec,
            )  # fmt: skip
            await self.publish(request, project)
            while len(answer.ready | answer.failed) < count and answer.error is None:
                try:
                    part = await inbox.next(max(0.01, end - time.monotonic()))
                except Unavailable:
                    continue  # the connection was lost; the inbox is still there
                except DeadlineExceeded as err:
                    answer.error = err
                    break
                except DSecError as err:
                    answer.error = err
                    break
                if part.kind == "progress":
                    answer.progress.append(part.decode(Progress))
                else:
                    self._note(answer, part.decode(Announcement))
                if settled is not None and settled(answer):
                    break
        return answer

    def _note(self, answer: Answer, message: Announcement) -> None:
        for item in message.ready:
            known = answer.ready.setdefault(item.index, item.sandbox_id)
            if known != item.sandbox_id:
                answer.twice.append((item.index, known, item.sandbox_id))
        answer.failed.update(message.failed)

    async def publish(self, request: PlaceRequest, project: str = PROJECT) -> None:
        await self.caller.stream_publish(
            subjects.PLACE, request, project=project,
            tail=subjects.lane_tail(project, request.spec.qos, request.spec.backend),
            msg_id=random_token(), ttl_s=request.budget_ms / 1e3, request_id=request.request_id,
        )  # fmt: skip

    async def cancel(self, request_id: str, key: str) -> None:
        await self.caller.request(
            subjects.CANCEL, CancelRequest(request_id=request_id, key=key), project=PROJECT,
            budget_s=5.0,
        )  # fmt: skip

    def running(self) -> set[str]:
        return {s for edge in self.edges.values() for s in edge.sandboxes}
