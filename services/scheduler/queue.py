"""What waits in the queue: depth and age per lane of a project, as the stream itself knows them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Final

from libdsec.bus import Bus
from libdsec.errors import Unavailable
from libdsec.wire import subjects
from libdsec.wire.deadletter import LaneDepth, QueueListing

LANES: Final = 256  # shown at most

_API_S: Final = 2.0


async def read_queue(bus: Bus, project: str) -> QueueListing:
    """The lanes of `project` in which something waits, the deepest first.

    Raises:
        Unavailable: JetStream does not answer.
    """
    pattern = subjects.PLACE.subject(project=project, tail=">")
    info = await _api(bus, "STREAM.INFO", {"subjects_filter": pattern})
    counts: dict[str, int] = (info["state"].get("subjects") or {}) if "state" in info else {}
    deepest = sorted(counts.items(), key=lambda item: -item[1])[:LANES]
    now_s = datetime.fromisoformat(info["ts"]).timestamp()
    lanes = []
    for subject, waiting in deepest:
        lane = subject.partition(".place.")[2]
        lanes.append(
            LaneDepth(lane=lane, waiting=waiting, oldest_age_s=await _age_s(bus, subject, now_s))
        )
    return QueueListing(lanes=tuple(lanes))


async def _age_s(bus: Bus, subject: str, now_s: float) -> float:
    """Of the first message of a subject; 0 if it has just left."""
    answer = await _api(bus, "STREAM.MSG.GET", {"seq": 1, "next_by_subj": subject})
    if "message" not in answer:
        return 0.0
    stored_s = datetime.fromisoformat(answer["message"]["time"]).timestamp()
    return max(0.0, round(now_s - stored_s, 3))


async def _api(bus: Bus, verb: str, request: dict[str, Any]) -> dict[str, Any]:
    subject = f"$JS.API.{verb}.{subjects.PLACEMENTS.name}"
    data = json.dumps(request).encode()
    answer = await bus.ask_server(subject, data, label="$JS.API", budget_s=_API_S)
    parsed: dict[str, Any] = json.loads(answer.data)
    if parsed.get("error", {}).get("code") == 503:
        raise Unavailable("JetStream cannot say what waits just now", retry_after_s=1.0)
    return parsed
