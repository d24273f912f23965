"""What cannot work is refused with an error that names the thing and the way out."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from libdsec import DSecClient, Network, Policy
from libdsec.context import read_context
from libdsec.errors import (
    DSecError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SandboxDead,
    Unavailable,
    Unsupported,
)
from libdsec.wire import subjects
from libdsec.wire.sandbox import Backend, Qos
from services.stack.up import status
from tests.stack import IMAGE, SMALL, Stack


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"image": "public/no-such-image"}, NotFound, "no-such-image"),
        ({"image": "public/busybox@999"}, NotFound, "999"),
        ({"image": "no-such-image"}, NotFound, "no-such-image"),
        ({"image": "a b"}, InvalidArgument, "a b"),
        ({"image": ""}, InvalidArgument, "image"),
        ({"image": IMAGE, "workspace": "repo-x@3"}, NotFound, "repo-x"),
        ({"image": IMAGE, "toolkits": ["absent@1"]}, NotFound, "absent"),
        ({"image": IMAGE, "backend": "rocket"}, InvalidArgument, "rocket"),
        ({"image": IMAGE, "backend": "microvm"}, Unsupported, "microvm"),
        ({"image": IMAGE, "memory_mib": -1}, InvalidArgument, "memory_mib"),
        ({"image": IMAGE, "memory_mib": 1 << 20}, InvalidArgument, "memory_mib"),
        ({"image": IMAGE, "disk_mib": 4 << 20}, InvalidArgument, "disk_mib"),
        ({"image": IMAGE, "cpus": 0}, InvalidArgument, "cpus"),
        ({"image": IMAGE, "cpus": 200.0, "qos": "latency-sensitive"}, InvalidArgument, "cpus"),
        ({"image": IMAGE, "pids": 1}, InvalidArgument, "pids"),
        ({"image": IMAGE, "qos": "urgent"}, InvalidArgument, "urgent"),
        ({"image": IMAGE, "cpu": 1}, InvalidArgument, "cpu"),
        ({"image": IMAGE, "idle_timeout_s": 0}, InvalidArgument, "idle_timeout_s"),
        ({"image": IMAGE, "user": "nobody-here"}, InvalidArgument, "nobody-here"),
    ],
)
async def test_impossible_request_is_told_what_is_wrong(
    client: DSecClient, arguments: dict[str, object], error: type[DSecError], names: str
) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(error, match=names) as told:
        await _first_command(client, {**SMALL, **arguments})
    assert told.value.hint, f"no way out: {told.value}"
    assert told.value.request_id
    assert loop.time() - began < 10, "it must be told at once, not at the time limit"


async def test_a_protection_that_no_node_can_enforce_is_refused(client: DSecClient) -> None:
    policy = Policy(network=Network.none(), protected_paths=("/tests/**",))
    with pytest.raises(Unsupported, match="protected_paths") as told:
        await client.create(image=IMAGE, **SMALL, policy=policy, timeout=15)
    assert told.value.hint


async def test_ids_that_name_nothing(stack: Stack, client: DSecClient) -> None:
    node = stack.node_names[0]
    made = await client.create(image=IMAGE, **SMALL)
    await made.stop()
    incarnation = made.id.split("_")[1]
    cases: dict[str, type[DSecError]] = {
        "no id at all": InvalidArgument,
        f"{made.node}_{incarnation}_aaaaaaaaaaaa": NotFound,  # of this node, never made
        f"{node}_aaaaaa_aaaaaaaaaaaa": SandboxDead,  # of the node before it was made anew
        "nowhere_aaaaaa_aaaaaaaaaaaa": Unavailable,  # of a node that nobody knows
    }
    for sandbox_id, error in cases.items():
        with pytest.raises(error) as told:
            await client.connect(sandbox_id)
        assert sandbox_id in str(told.value) or "nowhere" in str(told.value)


async def test_another_projects_subject_is_forbidden(stack: Stack) -> None:
    intruder = DSecClient(context=stack.context, project="team-z")
    with pytest.raises(PermissionDenied, match="team-z") as told:
        await intruder.create(image=IMAGE, **SMALL, timeout=20)
    assert told.value.hint
    with pytest.raises(PermissionDenied, match="team-z"):
        _ = [info async for info in intruder.list()]
    await intruder.close()


async def test_wrong_credentials_are_refused(stack: Stack) -> None:
    with pytest.raises(PermissionDenied):
        async with DSecClient(context=stack.context, user="default", password="wrong-password"):
            pass


async def test_without_nats_it_names_the_address(stack: Stack) -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1") as told:
        await DSecClient("nats://127.0.0.1:1", project="p", user="u", password="p").open()
    assert told.value.hint
    said = stack.dsec("ps", env={"DSEC_SERVERS": "nats://127.0.0.1:1"})
    assert (said.returncode, said.stdout) == (3, "")
    assert "127.0.0.1:1" in said.stderr


async def test_malformed_message_is_a_dead_letter_and_blocks_nothing(
    stack: Stack, client: DSecClient
) -> None:
    context = read_context(stack.context)
    peer = await nats.connect(
        list(context.servers or ()), user=context.user, password=context.password,
        inbox_prefix=f"_INBOX.{context.project}.{context.user}",
    )  # fmt: skip
    lane = subjects.lane_subject("default", Qos.BEST_EFFORT, Backend.CONTAINER)
    await _publish(peer, lane, b"this is not JSON")
    await _publish(peer, lane, b'{"request_id": "x", "count": "many"}')
    await (await client.create(image=IMAGE, **SMALL, timeout=20)).stop()  # the same lane
    letters = await _letters(stack, 2)
    assert all(letter["subject"] == lane for letter in letters)
    assert "JSON" in str(letters[0]["reason"])
    assert "count" in str(letters[1]["reason"])

    [first, second] = [str(letter["seq"]) for letter in letters]
    replayed = stack.dsec("dlq", "replay", first, context=stack.operator_context)
    assert (replayed.returncode, replayed.stdout.split()) == (0, [first])
    again = await _letters(stack, 2)  # it went round, and is as malformed as before
    seqs = [str(letter["seq"]) for letter in again]
    assert seqs[0] == second
    assert again[1]["payload"] == letters[0]["payload"]
    gone = stack.dsec("dlq", "discard", *seqs, context=stack.operator_context)
    assert gone.returncode == 0
    assert await _letters(stack, 0) == []
    assert stack.dsec("dlq", "list").returncode == 3, "dead letters are an operator's business"
    await peer.close()


async def _first_command(client: DSecClient, arguments: dict[str, object]) -> None:
    """What only the image can tell comes with the first command."""
    async with await client.create(**arguments, timeout=30) as sandbox:  # type: ignore[arg-type]
        await sandbox.exec(["true"])


async def _publish(peer: Client, subject: str, payload: bytes) -> None:
    """As a stored publish, so that it is known to be in the lane."""
    answer = await peer.request(subject, payload, timeout=5, headers={"Nats-TTL": "60s"})
    assert b'"seq"' in answer.data


async def _letters(stack: Stack, count: int) -> list[dict[str, object]]:
    async with asyncio.timeout(15):
        while True:
            async with DSecClient(context=stack.operator_context) as operator:
                listing = await operator.operations.dead_letters()
            if len(listing.letters) == count:
                return [letter.model_dump(mode="json") for letter in listing.letters]
            await asyncio.sleep(0.1)


async def test_second_edge_of_a_node_refuses_to_start(stack: Stack, client: DSecClient) -> None:
    name = f"edge-{stack.node_names[0]}"
    [pid] = [p["pid"] for p in await status(stack.paths) if p["name"] == name]
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    env = {**dict(pair.split("=", 1) for pair in pairs if pair), "DSEC_HTTP_PORT": "0"}
    second = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "services.edge"],
        env=env, capture_output=True, text=True, timeout=30, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    said = second.stdout + second.stderr
    assert second.returncode != 0
    assert f"another edge serves node {stack.node_names[0]}: process {pid}" in said
    assert "stop it first" in said
    assert os.path.exists(f"/proc/{pid}")
    await (await client.create(image=IMAGE, **SMALL)).stop()
