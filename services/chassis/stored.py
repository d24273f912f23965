"""Single messages of a stream, read and removed through the server's API."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from libdsec.bus import Bus, Part, refusal
from libdsec.errors import Unavailable

_NOT_FOUND = (10037, 10043)  # no message found; wrong sequence


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as the stream keeps it; after a direct get the headers' names are lower-case."""

    subject: str
    data: bytes
    headers: dict[str, str]
    seq: int

    @classmethod
    def direct(cls, part: Part) -> StoredMessage:
        """From the answer to a direct get, whose headers say where the message comes from."""
        headers = part.headers
        return cls(headers["nats-subject"], part.data, dict(headers), int(headers["nats-sequence"]))

    @classmethod
    def read(cls, message: dict[str, Any]) -> StoredMessage:
        lines = base64.b64decode(message.get("hdrs", "")).decode("utf-8", "replace").splitlines()
        pairs = (line.partition(":") for line in lines[1:] if line)
        headers = {name.strip(): value.strip() for name, _, value in pairs}
        data = base64.b64decode(message.get("data", ""))
        return cls(message["subject"], data, headers, message["seq"])


async def last_message(
    bus: Bus, stream: str, subject: str, *, budget_s: float = 5.0
) -> StoredMessage | None:
    """The newest message of a subject. With replicas it may be a follower's, a moment old."""
    part = await bus.ask_server(
        f"$JS.API.DIRECT.GET.{stream}.{subject}", label="$JS.API", budget_s=budget_s
    )
    status = part.headers.get("status")
    if status is None:
        return StoredMessage.direct(part)
    if status == "404":
        return None
    raise Unavailable(f"{subject}: {status} {part.headers.get('description', '')}")


async def message_at(
    bus: Bus, stream: str, seq: int, *, budget_s: float = 5.0
) -> StoredMessage | None:
    return await _get(bus, stream, {"seq": seq}, budget_s)


async def delete_message(bus: Bus, stream: str, seq: int, *, budget_s: float = 5.0) -> bool:
    """False when there is none."""
    answer = await _api(bus, f"STREAM.MSG.DELETE.{stream}", {"seq": seq}, budget_s)
    return "error" not in answer


async def stream_state(bus: Bus, stream: str, *, budget_s: float = 5.0) -> dict[str, Any]:
    """The server's `state` of a stream: messages, bytes, first_seq, last_seq, …"""
    answer = await _api(bus, f"STREAM.INFO.{stream}", {}, budget_s)
    if "error" in answer:
        raise refusal(answer["error"], f"stream {stream}")
    state: dict[str, Any] = answer["state"]
    return state


async def _get(
    bus: Bus, stream: str, request: dict[str, Any], budget_s: float
) -> StoredMessage | None:
    answer = await _api(bus, f"STREAM.MSG.GET.{stream}", request, budget_s)
    if "error" not in answer:
        return StoredMessage.read(answer["message"])
    if answer["error"].get("err_code") in _NOT_FOUND:
        return None
    raise refusal(answer["error"], f"stream {stream}")


async def _api(bus: Bus, verb: str, request: dict[str, Any], budget_s: float) -> dict[str, Any]:
    data = json.dumps(request).encode() if request else b""
    part = await bus.ask_server(f"$JS.API.{verb}", data, label="$JS.API", budget_s=budget_s)
    parsed: dict[str, Any] = json.loads(part.data)
    if "error" in parsed and parsed["error"].get("code") == 503:
        raise refusal(parsed["error"], verb)
    if parsed.get("success") is False:
        parsed.setdefault("error", {"description": "not done"})
    return parsed
