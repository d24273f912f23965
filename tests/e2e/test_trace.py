"""One create and one exec are each one trace over all processes, and any caller can read it."""

from __future__ import annotations

from typing import Any

from libdsec import DSecClient, Network, Policy
from tests.stack import IMAGE, SMALL, Stack

from .mirror import Mirror

PHASES = {"queued", "placed", "accepted", "layers", "network", "policy", "start", "ready"}


async def traced(stack: Stack, client: DSecClient, request_id: str) -> dict[str, Any]:
    """As `dsec trace --json` has it; the client's own spans are with an edge once it is closed."""
    await client.close()
    document = stack.dsec_json("trace", request_id)
    assert isinstance(document, dict)
    [trace] = document["traces"]
    assert document["request_id"] == request_id
    return trace  # type: ignore[no-any-return]


async def test_a_create_shows_every_phase(stack: Stack, client: DSecClient, mirror: Mirror) -> None:
    policy = Policy(network=Network.allow(services=["pypi"]))
    await (await client.create(image=IMAGE, **SMALL)).stop()  # the layer is warm from here on
    sandbox = await client.create(image=IMAGE, **SMALL, policy=policy)
    await sandbox.stop()
    assert {"queued", "accepted", "layers", "network", "policy", "start", "ready"} <= set(
        sandbox.phases_ms
    )
    trace = await traced(stack, client, sandbox.request_id)
    names = {span["name"] for span in trace["spans"]}
    assert names >= PHASES, f"missing: {PHASES - names}"
    assert {"libdsec", "scheduler", "edge", "policy"} <= {s["service"] for s in trace["spans"]}
    assert trace["root"] == "create"
    assert trace["uncovered_share"] <= 0.2
    parents = {span["span_id"] for span in trace["spans"]}
    assert all(s["parent_id"] in parents for s in trace["spans"] if s["depth"] > 0)


async def test_an_exec_is_one_trace_down_to_the_agent(stack: Stack, client: DSecClient) -> None:
    async with await client.create(image=IMAGE, **SMALL) as sandbox:
        result = await sandbox.exec("sleep 0.2")
    trace = await traced(stack, client, result.request_id)
    assert trace["root"] == "exec"
    assert {"libdsec", "edge"} <= {span["service"] for span in trace["spans"]}
    [run] = [span for span in trace["spans"] if span["name"] == "agent run"]
    assert 200 <= run["duration_ms"] <= trace["duration_ms"]
    assert trace["uncovered_share"] <= 0.2


async def test_a_tree_is_drawn_for_people(stack: Stack, client: DSecClient) -> None:
    sandbox = await client.create(image=IMAGE, **SMALL)
    await sandbox.stop()
    await client.close()
    drawn = stack.dsec("trace", sandbox.request_id).stdout
    assert all(phase in drawn for phase in PHASES)
    assert "not covered by any span" in drawn


async def test_a_refusal_is_a_trace_as_well(stack: Stack, client: DSecClient) -> None:
    failed = stack.dsec("create", "public/no-such-image", "--json")
    assert failed.returncode == 3
    assert "no-such-image" in failed.stderr
    request_id = failed.stderr.split('"request_id": "')[1].split('"')[0]
    trace = await traced(stack, client, request_id)
    [placed] = [span for span in trace["spans"] if span["name"] == "placed"]
    assert "no-such-image" in placed["error"]


async def test_nobody_remembers_what_never_was(stack: Stack) -> None:
    asked = stack.dsec("trace", "feedfacefeedfacefeedface")
    assert asked.returncode == 3
    assert "feedfacefeedfacefeedface" in asked.stderr
