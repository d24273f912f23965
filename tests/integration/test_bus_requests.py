"""Requests over a real server: answers, errors, budgets, traces, bounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import pytest
from opentelemetry import trace

from libdsec.bus import Bus, Call, Part, current_call
from libdsec.errors import (
    DataLoss,
    DeadlineExceeded,
    DeathReason,
    Internal,
    InvalidArgument,
    NotFound,
    SandboxDead,
    Unavailable,
)
from libdsec.wire import subjects
from libdsec.wire.envelope import Rpc
from libdsec.wire.execution import ExecDone, ExecRequest, ExecStarted
from libdsec.wire.model import Empty

from .conftest import Connect

EXEC = subjects.EXEC
REQUEST = ExecRequest(sandbox_id="n1_abcdef_abcdefghijkl", exec_id="e1", argv=("true",))
DONE = ExecDone(exec_id="e1", exit_code=0)


async def ask(bus: Bus, budget_s: float = 5.0, **options: object) -> ExecDone:
    return await bus.request(
        EXEC,
        REQUEST,
        budget_s=budget_s,
        project="p1",
        node="n1",
        **options,  # type: ignore[arg-type]
    )


async def test_a_handler_gets_the_message_and_what_the_subject_says(bus: Bus) -> None:
    seen: list[tuple[ExecRequest, str, str, str]] = []

    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        seen.append((request, call.project, call.node, call.request_id))
        return DONE

    await bus.serve(EXEC, handle, node="n1")
    assert await ask(bus, request_id="r1") == DONE
    assert seen == [(REQUEST, "p1", "n1", "r1")]


async def test_nobody_there_is_told_at_once_and_names_the_owner(bus: Bus) -> None:
    async with asyncio.timeout(1.0):
        with pytest.raises(Unavailable, match="the edge is not there") as caught:
            await ask(bus, budget_s=30)
    assert caught.value.request_id
    assert caught.value.trace_id


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (NotFound("no such sandbox", hint="list them"), NotFound),
        (SandboxDead("gone", reason=DeathReason.OOM), SandboxDead),
        (ValueError("a secret"), Internal),
        (asyncio.CancelledError(), Internal),
        (TimeoutError("its own"), Internal),
    ],
)
async def test_what_a_handler_raises_arrives_as_its_kind(
    bus: Bus, raised: BaseException, expected: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        raise raised

    await bus.serve(EXEC, handle, node="n1")
    with caplog.at_level(logging.CRITICAL), pytest.raises(expected) as caught:
        await ask(bus, request_id="r7")
    err = caught.value
    assert type(err) is expected
    assert "secret" not in str(err)
    assert err.request_id == "r7"  # type: ignore[attr-defined]
    if isinstance(err, SandboxDead):
        assert err.reason is DeathReason.OOM


async def test_handlers_that_raise_or_cancel_themselves_leave_the_subscription_alive(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    failures = iter([asyncio.CancelledError(), RuntimeError("boom"), asyncio.CancelledError()])

    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        if (failure := next(failures, None)) is not None:
            raise failure
        return DONE

    await bus.serve(EXEC, handle, node="n1")
    for _ in range(3):
        with pytest.raises(Internal):
            await ask(bus)
    assert await ask(bus) == DONE


async def test_handlers_of_one_subscription_run_at_the_same_time(bus: Bus) -> None:
    together = asyncio.Barrier(20)

    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        await together.wait()  # passes only when all twenty are here
        return DONE

    await bus.serve(EXEC, handle, node="n1", concurrency=20)
    answers = await asyncio.gather(*(ask(bus) for _ in range(20)))
    assert answers == [DONE] * 20


async def test_over_its_bound_a_server_refuses_fast_instead_of_queueing(bus: Bus) -> None:
    release = asyncio.Event()
    entered = asyncio.Semaphore(0)

    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        entered.release()
        await release.wait()
        return DONE

    await bus.serve(EXEC, handle, node="n1", concurrency=2, backlog=1)
    running = [asyncio.create_task(ask(bus)) for _ in range(3)]
    for _ in range(2):
        await entered.acquire()
    with pytest.raises(Unavailable) as caught:
        await ask(bus)
    assert caught.value.retry_after_s
    release.set()
    assert await asyncio.gather(*running) == [DONE] * 3


async def test_two_replicas_share_a_queue_without_blocking_each_other(connect: Connect) -> None:
    together = asyncio.Barrier(20)
    counts = {"a": 0, "b": 0}

    def handler(name: str) -> Callable[[ExecRequest, Call], Awaitable[ExecDone]]:
        async def handle(request: ExecRequest, call: Call) -> ExecDone:
            counts[name] += 1
            await together.wait()
            return DONE

        return handle

    for name in counts:
        await (await connect(name)).serve(EXEC, handler(name), queue="edges", node="n1")
    client = await connect("client")
    await asyncio.gather(*(ask(client) for _ in range(20)))
    assert sum(counts.values()) == 20
    assert all(counts.values())


async def test_a_budget_that_runs_out_cancels_the_handler(bus: Bus) -> None:
    cancelled = asyncio.Event()

    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return DONE

    await bus.serve(EXEC, handle, node="n1")
    with pytest.raises(DeadlineExceeded):
        await ask(bus, budget_s=0.1)
    await asyncio.wait_for(cancelled.wait(), 2)


async def test_a_request_inside_a_handler_gives_away_only_what_is_left(connect: Connect) -> None:
    edge, policy, client = [await connect(name) for name in ("edge", "policy", "client")]
    inner = Rpc("t.inner", Empty, Empty, "policy")
    seen: list[tuple[str, float, str]] = []

    async def at_policy(request: Empty, call: Call) -> Empty:
        seen.append((call.request_id, call.budget.remaining_s, call.trace_id))
        return Empty()

    async def at_edge(request: ExecRequest, call: Call) -> ExecDone:
        await edge.request(inner, Empty(), budget_s=1000)
        assert current_call() is call
        seen.append((call.request_id, call.budget.remaining_s, call.trace_id))
        return DONE

    await policy.serve(inner, at_policy)
    await edge.serve(EXEC, at_edge, node="n1")
    await ask(client, budget_s=7, request_id="r9")
    (inner_id, inner_s, inner_trace), (outer_id, _, outer_trace) = seen
    assert inner_id == outer_id == "r9"
    assert 0 < inner_s <= 7
    assert inner_trace == outer_trace != ""


async def test_the_subscribers_own_context_does_not_leak_into_messages(bus: Bus) -> None:
    seen: list[tuple[int, str]] = []
    ambient = ContextVar("ambient", default="nothing")

    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        seen.append((trace.get_current_span().get_span_context().trace_id, ambient.get()))
        return DONE

    ambient.set("the subscriber's")
    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=False))
    with trace.use_span(span):
        await bus.serve(EXEC, handle, node="n1")
    await ask(bus)
    await ask(bus)
    (first, around_first), (second, around_second) = seen
    assert len({first, second, 0xABC}) == 3
    assert around_first == around_second == "nothing"


async def test_a_canonicalised_header_of_another_language_is_understood(bus: Bus) -> None:
    seen: list[tuple[int, str]] = []

    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        seen.append((trace.get_current_span().get_span_context().trace_id, call.request_id))
        return DONE

    await bus.serve(EXEC, handle, node="n1")
    headers = {"Traceparent": f"00-{0x123:032x}-{0x456:016x}-01", "DSEC-REQUEST-ID": "go"}
    await bus.nats.request(EXEC.subject(project="p1", node="n1"), REQUEST.encode(), headers=headers)
    assert seen == [(0x123, "go")]


async def test_a_malformed_request_is_refused_without_repeating_its_values(bus: Bus) -> None:
    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        raise AssertionError("never reached")

    await bus.serve(EXEC, handle, node="n1")
    bad = Rpc(EXEC.template, Malformed, ExecDone, "the edge")
    with pytest.raises(InvalidArgument, match="sandbox_id") as caught:
        await bus.request(bad, Malformed(exec_id="tops3cret"), budget_s=5, project="p1", node="n1")
    assert "tops3cret" not in str(caught.value)


class Malformed(Empty):
    exec_id: str


async def test_a_reply_with_another_nonce_is_dropped(connect: Connect) -> None:
    server, client = await connect("server"), await connect("client")

    async def forge(msg: object) -> None:
        await server.nats.publish(msg.reply, DONE.encode(), headers={"Dsec-Nonce": "not-yours"})  # type: ignore[attr-defined]

    await server.nats.subscribe(EXEC.subject(project="p1", node="n1"), cb=forge)
    await server.flush()
    with pytest.raises(DeadlineExceeded):
        await ask(client, budget_s=0.2)


async def test_a_missing_token_is_refused_before_anything_is_sent(bus: Bus) -> None:
    with pytest.raises(InvalidArgument, match="part of the address is missing"):
        await bus.request(EXEC, REQUEST, budget_s=1, project="p1")


async def test_messages_that_are_too_large_are_typed_on_both_sides(bus: Bus) -> None:
    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        return ExecDone(exec_id="e1", exit_code=0, stdout=b"x" * (1 << 20))

    await bus.serve(EXEC, handle, node="n1")
    with pytest.raises(DataLoss, match="more than one message holds"):
        await ask(bus)
    huge = REQUEST.model_copy(update={"stdin": b"x" * (1 << 20)})
    with pytest.raises(InvalidArgument, match="more than NATS takes"):
        await bus.request(EXEC, huge, budget_s=5, project="p1", node="n1")


async def test_parts_come_in_order_before_the_answer(bus: Bus) -> None:
    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        await call.send("started", ExecStarted(exec_id="e1", pid=7))
        for n in range(5):
            await call.send("output", bytes([n]), {"Dsec-Stream": "1"})
        return DONE

    await bus.serve(EXEC, handle, node="n1")
    parts: list[Part] = []
    assert await ask(bus, on_part=parts.append) == DONE
    assert [part.kind for part in parts] == ["started"] + ["output"] * 5
    assert parts[0].decode(ExecStarted).pid == 7
    assert [part.data for part in parts[1:]] == [bytes([n]) for n in range(5)]
    assert parts[1].headers["dsec-stream"] == "1"


async def test_a_conversation_is_read_at_the_callers_pace(bus: Bus) -> None:
    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        for n in range(3):
            await call.send("output", bytes([n]))
        return DONE

    await bus.serve(EXEC, handle, node="n1")
    async with bus.converse(EXEC, REQUEST, budget_s=5, project="p1", node="n1") as talk:
        assert [part.data async for part in talk] == [b"\0", b"\1", b"\2"]
        assert talk.result == DONE


async def test_a_conversation_that_is_not_read_loses_parts_and_says_so(bus: Bus) -> None:
    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        for n in range(10):
            await call.send("output", bytes([n]))
        return DONE

    await bus.serve(EXEC, handle, node="n1")
    async with bus.converse(EXEC, REQUEST, budget_s=5, limit=4, project="p1", node="n1") as talk:
        await ask(bus)  # its parts and its answer come after the other's
        assert [(await talk.next()).data for _ in range(4)] == [b"\0", b"\1", b"\2", b"\3"]  # type: ignore[union-attr]
        with pytest.raises(DataLoss, match="7 messages were dropped"):
            await talk.next()


async def test_a_silent_server_is_noticed_before_the_budget_ends(bus: Bus) -> None:
    async def handle(request: ExecRequest, call: Call) -> ExecDone:
        await call.send("started", ExecStarted(exec_id="e1", pid=7))
        await asyncio.Event().wait()
        return DONE

    await bus.serve(EXEC, handle, node="n1")
    with pytest.raises(Unavailable, match="said nothing"):
        await ask(bus, budget_s=3, idle_s=0.1, on_part=lambda part: None)
