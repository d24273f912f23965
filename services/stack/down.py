"""`dsec down`: every process ended, and every mount, cgroup, interface and pin of the nodes gone.

Works whether the supervisor answers, was killed, or the machine only kept the leftovers: stopping
goes by the recorded processes, removing by the names on the host. Layers, users and the journal's
directory stay; the sandboxes do not.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import closing
from ipaddress import IPv4Network

from libhost.bpf.pins import remove_pins
from libhost.cgroup import NodeCgroups
from libhost.crun import Runtime
from libhost.disk import open_disk
from libhost.enter import remove_node_namespace
from libhost.errors import HostError
from libhost.net import NodeNetwork
from libhost.paths import NodePaths
from libhost.probe import probe_host
from libhost.sweep import Host, find_remains, remove_sandbox
from libhost.writable import empty_trash

from .control import ask_control
from .description import NodeDescription, StackDescription
from .layout import StackPaths
from .plan import CRUN, built, unbuilt
from .supervisor import Supervisor

_STOP_SANDBOX_S = 10.0
_TRASH_BATCH = 10_000

Say = Callable[[str], None]


async def down(paths: StackPaths, description: StackDescription, *, say: Say) -> list[str]:
    """Take the stack away; returns what could not be removed."""
    await _stop_processes(paths, say)
    left: list[str] = []
    for node in description.nodes:
        node_paths = NodePaths(node.name, paths.node_state(node.name), paths.node_run(node.name))
        if node_paths.state_dir.exists():
            say(f"clearing node {node.name}")
            left += await asyncio.to_thread(clear_node, node, node_paths)
    return left


async def _stop_processes(paths: StackPaths, say: Say) -> None:
    try:
        async for line in ask_control(paths.control, {"command": "down"}):
            if text := line.get("say") or line.get("error"):
                say(str(text))
    except ConnectionError:
        orphans = Supervisor(paths)
        orphans.hold()
        if orphans.adopt_left():
            say("the supervisor is gone; stopping what it left")
            await orphans.down()


def clear_node(node: NodeDescription, paths: NodePaths) -> list[str]:
    """Remove everything on the host that carries the node's name; returns what resisted."""
    if missing := unbuilt():
        return [f"node {node.name}: it takes {path}, which does not exist" for path in missing]
    found = probe_host(paths.state_dir)
    if found.cgroups is None or found.disk is None or found.overlay is None:
        return [f"node {node.name}: {problem}" for problem in found.problems]
    host = Host(
        paths=paths,
        cgroups=NodeCgroups(found.cgroups, paths),
        disk=open_disk(paths, found.disk, found.overlay, pool_size=0),
        network=NodeNetwork(paths, IPv4Network(node.addresses), pool_size=0),
        runtime=Runtime(paths, crun=CRUN, launcher=built("dsec-launch"), agent=built("aether")),
    )
    with closing(host.runtime):
        errors: list[Exception] = []
        for remains in find_remains(host).values():
            errors += remove_sandbox(host, remains, timeout_s=_STOP_SANDBOX_S)
        errors += _remove_node(host)
    return [f"node {node.name}: {err}" for err in errors]


def _remove_node(host: Host) -> list[Exception]:
    """What belongs to the node itself, in the reverse of the order it was made in."""
    errors: list[Exception] = []
    steps: list[Callable[[], object]] = [
        lambda: remove_pins(host.paths),
        host.cgroups.remove,
        host.network.remove_gateway if host.network else lambda: None,
        host.disk.close,
        lambda: remove_node_namespace(host.paths),
        lambda: _empty(host),
    ]
    for step in steps:
        try:
            step()
        except (OSError, HostError) as err:
            errors.append(err)
    return errors


def _empty(host: Host) -> None:
    while empty_trash(host.paths, budget_files=_TRASH_BATCH):
        pass
    # A journal would have a later edge look for sandboxes that were taken away on purpose.
    shutil.rmtree(host.paths.state_dir, ignore_errors=True)
    shutil.rmtree(host.paths.run_dir, ignore_errors=True)
