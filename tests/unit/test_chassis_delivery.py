"""The table of what becomes of a delivered message."""

from __future__ import annotations

import asyncio

import pytest

from libdsec import errors
from libdsec.wire.envelope import Durable, Stream
from services.chassis.delivery import Outcome, Retry, backoff_s, outcome_of

WORK = Stream(
    "WORK", ("t.>",), work_queue=True, max_age_s=1, max_bytes=1, max_msgs=1, discard_new=True
)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (None, Outcome.DONE),
        (errors.Unavailable("x"), Outcome.RETRY),
        (errors.QuotaExceeded("x"), Outcome.RETRY),
        (errors.NoCapacity("x"), Outcome.RETRY),
        (Retry("later"), Outcome.RETRY),
        (errors.InvalidArgument("x"), Outcome.DEAD),
        (errors.NotFound("x"), Outcome.DEAD),
        (ValueError("a bug"), Outcome.RETRY),
        (errors.Internal("somebody's bug"), Outcome.RETRY),
        (asyncio.CancelledError(), Outcome.LEFT),
    ],
)
def test_each_end_of_a_handler_has_one_outcome(
    failure: BaseException | None, expected: Outcome
) -> None:
    assert outcome_of(failure, expired=False, last_try=False) is expected


def test_only_bugs_die_at_the_last_try() -> None:
    assert outcome_of(ValueError("bug"), expired=False, last_try=True) is Outcome.DEAD
    assert outcome_of(errors.Unavailable("x"), expired=False, last_try=True) is Outcome.RETRY
    assert outcome_of(asyncio.CancelledError(), expired=False, last_try=True) is Outcome.LEFT


def test_what_nobody_waits_for_is_dropped_unless_it_was_done() -> None:
    assert outcome_of(TimeoutError(), expired=True, last_try=False) is Outcome.EXPIRED
    assert outcome_of(None, expired=True, last_try=False) is Outcome.DONE


def test_the_backoff_grows_to_its_last_step_and_is_spread() -> None:
    durable = Durable("d", WORK, "t.>", 30, -1, 1, backoff_s=(1.0, 4.0))
    for attempt, step in ((1, 1.0), (2, 4.0), (99, 4.0)):
        delays = {backoff_s(durable, attempt) for _ in range(50)}
        assert all(0.75 * step <= delay <= 1.25 * step for delay in delays)
        assert len(delays) > 1
