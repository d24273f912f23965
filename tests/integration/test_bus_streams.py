"""Publishing to a stream: acknowledged, once, refused when it is full."""

from __future__ import annotations

import time

import pytest

from libdsec.bus import Bus
from libdsec.errors import QuotaExceeded, Unavailable

from .jobs import JOB, Job, put


async def test_the_same_publish_twice_is_stored_once(topology: Bus) -> None:
    first = await topology.stream_publish(JOB, Job(n=1), msg_id="a", project="p1", tail="x")
    again = await topology.stream_publish(JOB, Job(n=1), msg_id="a", project="p1", tail="x")
    assert (first.duplicate, again.duplicate) == (False, True)
    assert first.seq == again.seq


async def test_a_full_stream_refuses_with_the_time_to_try_again(topology: Bus) -> None:
    await put(topology, *range(50))
    with pytest.raises(QuotaExceeded, match="queue is full") as caught:
        await put(topology, 50)
    assert caught.value.retry_after_s
    assert caught.value.retryable


async def test_a_subject_that_no_stream_keeps_is_unavailable_at_once(bus: Bus) -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable, match="a JetStream stream is not there"):
        await put(bus, 1)
    assert time.monotonic() - began < 2
