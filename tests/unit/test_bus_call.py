"""What travels beside a payload: tokens, budgets, trace context, JetStream's answers."""

from __future__ import annotations

import asyncio
import json

import pytest

from libdsec._bus.call import Budget, Part, SubjectTokens, enter_call, lowered, stated_budget
from libdsec._bus.tracing import parse_traceparent, send_hop
from libdsec.bus import Call, PubAck, current_call, leave_call
from libdsec.errors import Conflict, Internal, NotFound, QuotaExceeded, Unavailable
from libdsec.wire import subjects
from libdsec.wire.error import ErrorReply
from libdsec.wire.model import Empty
from libdsec.wire.sandbox import Backend, Qos


@pytest.mark.parametrize(
    ("template", "subject", "tokens"),
    [
        (subjects.EXEC.template, "dsec.v1.p.team-a.edge.n1.exec", ("team-a", "n1", "")),
        (subjects.HEARTBEAT.template, "dsec.v1.node.n7.heartbeat", ("", "n7", "")),
        (subjects.WHOHAS.template, "dsec.v1.nodes.whohas", ("", "", "")),
        (subjects.DEAD_LETTER.template, "dsec.v1.dlq.PLACEMENTS", ("", "", "PLACEMENTS")),
    ],
)
def test_a_subject_says_whom_it_is_about(
    template: str, subject: str, tokens: tuple[str, str, str]
) -> None:
    assert SubjectTokens(template).read(subject) == tokens


def test_a_tail_may_be_several_tokens() -> None:
    subject = subjects.lane_subject("team-a", Qos("best-effort"), Backend("container"))
    project, node, tail = SubjectTokens(subjects.PLACE.template).read(subject)
    assert (project, node) == ("team-a", "")
    assert subject.endswith(tail)
    assert tail.count(".") == 2


@pytest.mark.parametrize(
    ("stated", "low_s", "high_s"),
    [
        ("1500", 1.4, 1.5),
        ("0", 0, 0),
        ("", 29, 30),  # nothing stated: the default
        ("-5", 29, 30),
        ("soon", 29, 30),
        ("١٢", 29, 30),  # digits, but not ours
    ],
)
def test_a_budget_is_what_is_stated_or_the_default(
    stated: str, low_s: float, high_s: float
) -> None:
    headers = lowered({"DSEC-BUDGET-MS": stated} if stated else {})
    assert low_s <= stated_budget(headers, 30.0).remaining_s <= high_s


def test_a_budget_never_goes_below_zero() -> None:
    spent = Budget(-1.0)
    assert spent.expired
    assert spent.remaining_s == 0.0
    assert spent.header() == "0"
    aged = stated_budget(lowered({"dsec-budget-ms": "1000"}), 30.0, age_s=2.0)
    assert aged.expired


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{'g' * 32}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        "x" * 10_000,
    ],
)
def test_trace_context_that_is_none_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None


def test_trace_context_of_a_later_version_is_understood() -> None:
    context = parse_traceparent(f"01-{TRACE}-{SPAN}-03-more")
    assert context is not None
    assert (f"{context.trace_id:032x}", f"{context.span_id:016x}") == (TRACE, SPAN)
    assert context.trace_flags.sampled
    assert context.is_remote


def test_without_an_sdk_a_request_still_has_a_trace_of_its_own() -> None:
    first, second = send_hop("request", "t", "r1"), send_hop("request", "t", "r2")
    assert first.trace_id != second.trace_id
    context = parse_traceparent(first.traceparent)
    assert context is not None
    assert f"{context.trace_id:032x}" == first.trace_id


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"error": {"code": 503, "err_code": 10077, "description": "maximum"}}, QuotaExceeded),
        ({"error": {"code": 503, "err_code": 10008, "description": "away"}}, Unavailable),
        ({"error": {"code": 400, "err_code": 10071, "description": "wrong last"}}, Conflict),
        ({"error": {"code": 400, "err_code": 10164, "description": "wrong last"}}, Conflict),
        ({"error": {"code": 500, "err_code": 10166, "description": "no ttl"}}, Internal),
        ({"stream": "S"}, Internal),
        ([], Internal),
    ],
)
def test_what_jetstream_refuses_has_a_kind(answer: object, expected: type[Exception]) -> None:
    with pytest.raises(expected) as caught:
        PubAck.read(json.dumps(answer).encode(), "t.x")
    assert type(caught.value) is expected


def test_a_part_is_an_error_only_when_its_header_says_so() -> None:
    reply = ErrorReply.of(NotFound("gone", hint="look elsewhere")).encode()
    assert Part("", reply, {}).error() is None
    error = Part("", reply, {"dsec-error": "not_found"}).error()
    assert isinstance(error, NotFound)
    assert error.hint == "look elsewhere"
    with pytest.raises(Internal, match="not a Empty"):
        Part("", b"no json", {}).decode(Empty)


async def test_work_that_outlives_its_call_is_not_bound_by_it() -> None:
    call = Call(subject="t", tokens=("", "", ""), headers={}, budget=Budget(0.0), request_id="r")
    enter_call(call)
    seen: list[Call | None] = []

    async def later(leave: bool) -> None:
        if leave:
            leave_call()
        seen.append(current_call())

    await asyncio.gather(asyncio.create_task(later(False)), asyncio.create_task(later(True)))
    assert seen == [call, None]
    assert current_call() is call
