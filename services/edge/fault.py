"""Points at which an edge can be told to die, so that a test proves what survives.

`DSEC_FAULT=after_accept_fsync:kill` ends the process with SIGKILL the first time it comes by that
point, `after_accept_fsync:kill:5` the fifth time, `:exit` ends it in an orderly way for comparison.
Without the setting a point is one call of an empty function.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from enum import StrEnum


class Point(StrEnum):
    BEFORE_OFFER_REPLY = "before_offer_reply"
    AFTER_ACCEPT_FSYNC = "after_accept_fsync"
    BEFORE_ANNOUNCE = "before_announce"
    BEFORE_REPLY = "before_reply"
    DURING_START = "during_start"
    DURING_STOP = "during_stop"


class FaultSyntaxError(ValueError):
    """The setting names no point or no action."""


def _nothing(point: Point) -> None:
    """No fault is configured."""


def faults(setting: str) -> Callable[[Point], None]:
    """What to call at every point, from the text of the setting ("" for none)."""
    if not setting:
        return _nothing
    name, _, rest = setting.partition(":")
    action, _, count = rest.partition(":")
    if name not in set(Point) or action not in {"kill", "exit"} or not (count or "1").isdigit():
        points = ", ".join(Point)
        raise FaultSyntaxError(f"fault {setting!r} is not <point>:kill|exit[:n]; points: {points}")
    target, left = Point(name), int(count or "1")

    def die_there(point: Point) -> None:
        nonlocal left
        if point is not target:
            return
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGTERM)

    return die_there
