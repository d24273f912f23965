"""The bridge to blocking calls is bounded, and a call that times out does not free its thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from libhost.aio import HostThreads


async def test_result_and_error_come_back() -> None:
    threads = HostThreads(1)
    assert await threads.run(5, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(5, divmod, 7, 0)
    threads.close()


async def test_no_more_run_at_once_than_allowed() -> None:
    threads, gate = HostThreads(2), threading.Event()
    running: list[int] = []

    def hold() -> None:
        running.append(1)
        gate.wait(5)

    calls = [asyncio.create_task(threads.run(5, hold)) for _ in range(5)]
    while len(running) < 2:
        await asyncio.sleep(0)
    assert len(running) == 2
    gate.set()
    await asyncio.gather(*calls)
    assert len(running) == 5
    threads.close()


async def test_timed_out_call_keeps_its_thread() -> None:
    threads, gate = HostThreads(1), threading.Event()
    with pytest.raises(TimeoutError):
        await threads.run(0.01, gate.wait, 5)
    with pytest.raises(TimeoutError):
        await threads.run(0.01, int)  # waits for the thread, in vain
    gate.set()
    assert await threads.run(5, int) == 0
    threads.close()
