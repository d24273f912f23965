"""Whichever step of a start fails, or is cut short, nothing of the sandbox is left."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from libdsec.errors import DeathReason, PermissionDenied, Unavailable
from libdsec.wire.sandbox import NetworkAllow, PolicySpec
from services.edge import start
from services.edge.agent_link import AgentLink
from services.edge.holding import Holding
from services.edge.timing import Phases

from .edge_parts import Parts, edge_parts
from .test_edge_sandboxes import traces

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root"),
    pytest.mark.skipif(shutil.which("crun") is None, reason="crun is not installed"),
]

ALLOW = PolicySpec(network=NetworkAllow(rules=("tcp:10.0.0.5:443",)))


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    async with edge_parts() as parts:
        yield parts


def owners(parts: Parts) -> dict[str, tuple[Any, str]]:
    """Every step of a start as (object, attribute) that a test can break."""
    host = parts.node.host
    return {
        "disk": (host.disk, "create"),
        "socket": (start, "bind_agent_socket"),
        "layers": (parts.node.layers, "acquire"),
        "network": (host.network, "take"),
        "cgroup": (host.cgroups, "create"),
        "policy": (parts.policy, "apply"),
        "etc": (start, "write_etc"),
        "overlay": (start, "apply"),
        "gate": (host.network, "open_gate"),
        "launch": (host.runtime, "launch"),
        "process": (host.runtime, "start"),
        "agent": (AgentLink, "channel"),
        "journal": (parts.node.records, "save"),
    }


STEPS = ("disk", "socket", "layers", "network", "cgroup", "policy", "etc", "overlay", "launch",
         "gate", "process", "agent", "journal")  # fmt: skip


def failing(before: Callable[..., Any] | None, error: Exception) -> Callable[..., Any]:
    """Does the real thing first if it is given, so that the failure comes after the effect."""
    if before is not None and asyncio.iscoroutinefunction(before):

        async def late(*args: Any, **kwargs: Any) -> Any:
            await before(*args, **kwargs)
            raise error

        return late

    def broken(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        raise error

    return broken


async def attempt(parts: Parts) -> tuple[str, BaseException | None]:
    sandbox = parts.lifecycle.accept(parts.origin(policy=ALLOW))
    try:
        await parts.lifecycle.create(sandbox, parts.base, Phases())
    except Exception as err:
        return sandbox.id, err
    return sandbox.id, None


@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_fails_leaves_nothing(
    parts: Parts, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = owners(parts)[step]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing(None, OSError(errno.EIO, "injected")), raising=True)
        sandbox_id, err = await attempt(parts)
    assert err is not None
    assert traces(parts, sandbox_id) == {}
    assert parts.node.records.alive() == []
    # The node is none the worse: the next one starts.
    sandbox_id, err = await attempt(parts)
    assert err is None
    sandbox = parts.table.get(sandbox_id)
    assert sandbox is not None
    await parts.lifecycle.end(sandbox, DeathReason.STOPPED)
    assert traces(parts, sandbox_id) == {}


@pytest.mark.parametrize("step", ["policy", "gate", "etc"])
async def test_a_step_that_fails_after_its_effect_leaves_nothing(
    parts: Parts, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = owners(parts)[step]
    real = getattr(owner, name)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing(real, OSError(errno.EIO, "injected")))
        sandbox_id, err = await attempt(parts)
    assert isinstance(err, Unavailable)
    assert traces(parts, sandbox_id) == {}


async def test_no_process_ever_runs_without_the_policys_word(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    real = parts.node.host.runtime.start

    def recording(launch: Any, *args: Any, **kwargs: Any) -> Any:
        started.append(launch.sandbox.sandbox_id)
        return real(launch, *args, **kwargs)

    monkeypatch.setattr(parts.node.host.runtime, "start", recording)
    refusal = PermissionDenied("no such alias")
    with monkeypatch.context() as patched:
        patched.setattr(parts.policy, "apply", failing(None, refusal))
        _, err = await attempt(parts)
    assert err is refusal
    assert started == []


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005, 0.01, 0.02, 0.03])
async def test_a_start_that_is_abandoned_half_way_leaves_nothing(
    parts: Parts, after_s: float
) -> None:
    sandbox = parts.lifecycle.accept(parts.origin(policy=ALLOW))
    starting = asyncio.create_task(parts.lifecycle.create(sandbox, parts.base, Phases()))
    await asyncio.sleep(after_s)
    await parts.lifecycle.end(sandbox, DeathReason.STOPPED)
    await asyncio.wait({starting})
    assert traces(parts, sandbox.id) == {}
    assert parts.node.records.alive() == []


async def test_a_release_that_fails_does_not_keep_the_others_from_running(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox_id, err = await attempt(parts)
    assert err is None
    sandbox = parts.table.get(sandbox_id)
    assert sandbox is not None
    with monkeypatch.context() as patched:
        patched.setattr(parts.policy, "remove", failing(None, Unavailable("away")))
        await parts.lifecycle.end(sandbox, DeathReason.STOPPED)
    assert sandbox.holding.left_over == ["policy"]
    assert traces(parts, sandbox_id) == {"policy": True}


async def test_what_is_released_is_the_reverse_of_what_was_acquired(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = Holding._attempt

    async def recording(self: Holding, resource: Any, undo: Any) -> None:
        order.append(resource.value)
        await real(self, resource, undo)

    monkeypatch.setattr(Holding, "_attempt", recording)
    sandbox = await parts.sandbox()
    await parts.lifecycle.end(sandbox, DeathReason.STOPPED)
    assert order == ["process", "policy", "cgroup", "network", "layers", "directory"]


async def test_many_starts_and_stops_at_once_leave_nothing(parts: Parts) -> None:
    sandboxes = await asyncio.gather(*(parts.sandbox() for _ in range(12)))
    assert parts.node.layers.users_of(parts.base.base.digest) == {s.id for s in sandboxes}
    outputs = await asyncio.gather(*(parts.run(s, "hostname") for s in sandboxes))
    assert [o.stdout.decode().strip() for o in outputs] == [
        s.id.rpartition("_")[2] for s in sandboxes
    ]
    await asyncio.gather(*(parts.lifecycle.end(s, DeathReason.STOPPED) for s in sandboxes))
    for sandbox in sandboxes:
        assert traces(parts, sandbox.id) == {}
