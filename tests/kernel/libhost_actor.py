"""A process that plays a node's edge, to be killed: ``libhost_actor.py ROLE NODE DIRECTORY``.

Roles:
  founder    starts two sandboxes with a counter each, prints their ids, waits to be killed;
  storm      starts and removes sandboxes without end, from two threads, until it is killed;
  successor  finds what is left, prints what it sees of it as JSON, removes everything.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

from libhost.enter import enter_node_namespace
from libhost.layer import mounted_layers, umount_layer
from libhost.paths import NodePaths
from libhost.sweep import find_remains, remove_sandbox
from tests.kernel.libhost_node import REMOVE_TIMEOUT_S, Box, LibhostNode, materials

COUNTER = (
    "(n=0; while :; do n=$((n+1)); echo $n > /c; mv /c /count; sleep 0.01; done) >/dev/null 2>&1 &"
)


def found(node: LibhostNode) -> None:
    boxes = [node.start(network=True), node.start()]
    for box in boxes:
        box.sh(COUNTER)
    print(json.dumps([box.paths.sandbox_id for box in boxes]), flush=True)
    signal.pause()


def storm(node: LibhostNode) -> None:
    node.start()  # compiles, builds and mounts before the clock starts
    print("ready", flush=True)

    def start_and_remove(network: bool) -> None:
        while True:
            node.remove(node.start(network=network))

    for network in (False, True):
        threading.Thread(target=start_and_remove, args=[network], daemon=True).start()
    signal.pause()


def succeed(node: LibhostNode) -> None:
    layers = mounted_layers(node.paths)
    seen = {}
    for remains in find_remains(node.host).values():
        seen[remains.slot] = {"id": remains.sandbox_id, "found_in": sorted(remains.found_in)}
        if remains.sandbox_id is not None and (box := adopted(node, remains.sandbox_id)):
            seen[remains.slot] |= {
                "before": int(box.sh("cat /count 2>/dev/null || echo -1")),
                "after": int(box.sh("sleep 0.3; cat /count 2>/dev/null || echo -1")),
                "address": str(box.link.address) if box.link else None,
                "inside": box.sh("ip -o -4 addr show dev eth0 2>/dev/null"),
            }
    errors = []
    for remains in find_remains(node.host).values():
        errors += remove_sandbox(node.host, remains, timeout_s=REMOVE_TIMEOUT_S)
    left = list(find_remains(node.host))
    for layer in layers.values():
        umount_layer(node.paths, layer)
    node.close()
    report = {"seen": seen, "layers": len(layers), "left": left, "errors": list(map(repr, errors))}
    print(json.dumps(report), flush=True)


def adopted(node: LibhostNode, sandbox_id: str) -> Box | None:
    paths = node.paths.sandbox(sandbox_id)
    container = node.host.runtime.find(paths)
    if container is None or node.host.network is None:
        return None
    cgroup = node.host.cgroups.open(sandbox_id)
    return Box(paths, cgroup, container, node.host.network.find(paths))


def main() -> None:
    role, name, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    enter_node_namespace(NodePaths(name, directory / "state", directory / "run"))
    node = LibhostNode(name, directory, materials(directory))
    {"founder": found, "storm": storm, "successor": succeed}[role](node)


if __name__ == "__main__":
    main()
