"""What a fresh stack has in place: a busybox base anybody may start from, and a default context."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from libdsec import DSecClient
from libdsec.errors import NotFound, Unavailable
from libdsec.settings import default_context_path
from libdsec.wire.node import NodeState

from ..images import RECIPES, cached
from .configure import configure, operator_of
from .description import StackDescription
from .layout import StackPaths

_NODES_TIMEOUT_S = 20.0
_NODES_POLL_S = 0.1
BUSYBOX = "public/busybox"
VERSION = "1"


async def make_usable(
    paths: StackPaths, description: StackDescription, *, say: Callable[[str], None]
) -> None:
    """Publish the busybox base unless it is there, and wait until every node takes sandboxes.

    Raises:
        Unavailable: a node was not ready in time; the message names it.
    """
    operator = operator_of(configure(paths, description))
    if operator is None:
        say("no operator in users.toml: the busybox base is not published")
        return
    context = paths.home / f"{operator.name}.toml"
    async with DSecClient(context=context, project="public") as client:
        await _publish_busybox(client, paths, say)
        await _await_nodes(client, {node.name for node in description.nodes})


async def _publish_busybox(
    client: DSecClient, paths: StackPaths, say: Callable[[str], None]
) -> None:
    try:
        await client.layers.info(f"{BUSYBOX}@{VERSION}")
    except NotFound:
        say(f"publishing the base {BUSYBOX}@{VERSION}")
        archive = cached(RECIPES["busybox"], paths.home / "images")
        await client.layers.publish(archive, f"busybox@{VERSION}", "base")


async def _await_nodes(client: DSecClient, wanted: set[str]) -> None:
    """Until a scheduler's view shows them live, with a policy service that enforces."""
    missing = wanted
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_NODES_TIMEOUT_S):
            while missing:
                usable = {
                    view.heartbeat.node
                    for view in await client.nodes()
                    if view.state is NodeState.LIVE and view.heartbeat.policy_ready
                }
                if missing := wanted - usable:
                    await asyncio.sleep(_NODES_POLL_S)
    if missing:
        raise Unavailable(
            f"not ready after {_NODES_TIMEOUT_S:.0f} s: {', '.join(sorted(missing))}",
            hint="`dsec nodes` and the logs of their edge and policy service say why",
        )


def write_default_context(paths: StackPaths) -> Path:
    """Make a bare DSecClient() of this user speak to this stack."""
    target = default_context_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(paths.context, temporary)
    temporary.chmod(0o600)
    temporary.replace(target)
    return target
