"""The HTTP side of a service: /metrics, /healthz, /readyz, /debug/state, /debug/tasks.

Liveness is the event loop's own pulse and nothing else: restarting a process does not bring NATS
back. Readiness is a set of named facts. A few lines over asyncio instead of a web framework: GET
only, no bodies, one answer per connection, nothing unbounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from .clock import Clock

_REQUEST_TIMEOUT_S = 5.0
_HEAD_BYTES = 8192
_CONNECTIONS = 32
_BEAT_S = 0.25
_STATE_BYTES = 1 << 20
_TASKS = 200

Check = Callable[[], bool]
View = Callable[[], object]


class Pulse:
    """How late the event loop runs: a beat every quarter of a second, noted when it comes."""

    def __init__(self, clock: Clock, limit_s: float, note: Callable[[float], None]) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._note = note
        self._last_s = clock.monotonic_s()
        self.worst_s = 0.0

    async def beat(self) -> None:
        """Run for as long as the process does."""
        while True:
            began_s = self._clock.monotonic_s()
            await self._clock.sleep(_BEAT_S)
            self._last_s = self._clock.monotonic_s()
            lag_s = max(0.0, self._last_s - began_s - _BEAT_S)
            self.worst_s = max(
                lag_s, self.worst_s * 0.99
            )  # fades, so that old stalls are forgotten
            self._note(lag_s)

    @property
    def healthy(self) -> bool:
        since_s = self._clock.monotonic_s() - self._last_s
        return max(since_s - _BEAT_S, self.worst_s) < self._limit_s


@dataclass
class Health:
    """What this process says about itself; parts of a service add to it."""

    registry: CollectorRegistry
    pulse: Pulse
    checks: dict[str, Check] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    draining: bool = False

    def readiness(self) -> dict[str, bool]:
        """Each fact is true when it speaks for being ready."""
        return {"not draining": not self.draining} | {
            name: check() for name, check in self.checks.items()
        }


@dataclass(frozen=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    content_type: str = "application/json"

    @classmethod
    def of(cls, status: HTTPStatus, value: object) -> _Answer:
        return cls(status, json.dumps(value, default=str, indent=1).encode() + b"\n")

    def encode(self) -> bytes:
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"content-type: {self.content_type}\r\ncontent-length: {len(self.body)}\r\n"
            "connection: close\r\n\r\n"
        )
        return head.encode() + self.body


class HealthServer:
    """Lifecycle: start → (serves) → stop."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._server: asyncio.Server | None = None
        self._open = 0
        self._routes: Mapping[str, Callable[[], _Answer]] = {
            "/metrics": self._metrics,
            "/healthz": self._alive,
            "/readyz": self._ready,
            "/debug/state": self._state,
            "/debug/tasks": self._tasks,
        }

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port in use."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_HEAD_BYTES)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                writer.write((await self._answer(reader)).encode())
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a probe that went away or never asked
        finally:
            self._open -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> _Answer:
        if self._open > _CONNECTIONS:
            return _Answer.of(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
        head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.partition(b" ")
        path = rest.split(b" ", 1)[0].split(b"?", 1)[0].decode("ascii", "replace")
        if method != b"GET":
            return _Answer.of(HTTPStatus.METHOD_NOT_ALLOWED, "GET only")
        route = self._routes.get(path)
        if route is None:
            return _Answer.of(HTTPStatus.NOT_FOUND, sorted(self._routes))
        return route()

    def _metrics(self) -> _Answer:
        return _Answer(HTTPStatus.OK, _exposition(self._health.registry), CONTENT_TYPE_LATEST)

    def _alive(self) -> _Answer:
        pulse = self._health.pulse
        status = HTTPStatus.OK if pulse.healthy else HTTPStatus.SERVICE_UNAVAILABLE
        return _Answer.of(status, {"worst_loop_lag_s": round(pulse.worst_s, 3)})

    def _ready(self) -> _Answer:
        facts = self._health.readiness()
        status = HTTPStatus.OK if all(facts.values()) else HTTPStatus.SERVICE_UNAVAILABLE
        return _Answer.of(status, {"ready": all(facts.values()), "checks": facts})

    def _state(self) -> _Answer:
        state: dict[str, Any] = {name: view() for name, view in self._health.views.items()}
        answer = _Answer.of(HTTPStatus.OK, state)
        if len(answer.body) > _STATE_BYTES:
            sizes = {name: len(json.dumps(value, default=str)) for name, value in state.items()}
            return _Answer.of(HTTPStatus.OK, {"too large to show, bytes": sizes})
        return answer

    def _tasks(self) -> _Answer:
        tasks = sorted(f"{task.get_name()}: {task.get_coro()}" for task in asyncio.all_tasks())
        shown = {"tasks": len(tasks), "shown": min(len(tasks), _TASKS), "list": tasks[:_TASKS]}
        return _Answer.of(HTTPStatus.OK, shown)


def _exposition(registry: CollectorRegistry) -> bytes:
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text
