"""What each step of a create costs, beside bare crun: ``python -m tests.kernel.libhost_steps [N]``.

Rounds alternate a bare ``crun run --detach`` of the same tree on a plain directory, a create with
no network and one with a link, so that whatever else the machine does falls on all three.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from libhost import command, syscall
from libhost.cgroup import CgroupLimits, SchedClass
from libhost.crun import ContainerSpec, bind_agent_socket
from libhost.disk import DiskLimits
from libhost.enter import enter_node_namespace, remove_node_namespace
from libhost.overlay import apply, plan_overlay
from libhost.paths import NodePaths

from .libhost_node import Box, LibhostNode, materials

T = TypeVar("T")
DISK = DiskLimits(64)
LIMITS = CgroupLimits(memory_mib=256, pids=128)


class Steps:
    def __init__(self) -> None:
        self.taken_ms: defaultdict[str, list[float]] = defaultdict(list)

    def step(self, name: str, function: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = function()
        self.taken_ms[name].append((time.perf_counter() - began) * 1e3)
        return result


def create(node: LibhostNode, steps: Steps, *, network: bool) -> Box:
    host, paths = node.host, node.paths.sandbox(node.new_id())
    mark = "link" if network else "none"
    began = time.perf_counter()
    with ExitStack() as stack:
        writable = steps.step("disk", lambda: host.disk.create(paths, DISK))
        stack.callback(writable.close)
        listen_fd = steps.step("socket", lambda: bind_agent_socket(paths))
        stack.callback(os.close, listen_fd)
        plan = plan_overlay([node.base], writable.upper, writable.work, node.mode)
        root_fd = steps.step("overlay", lambda: apply(plan))
        stack.callback(os.close, root_fd)
        cgroup = steps.step(
            "cgroup", lambda: host.cgroups.create(paths.sandbox_id, SchedClass.LS, LIMITS)
        )
        link = None
        if network and (links := host.network) is not None:
            taken = link = steps.step("link: take", lambda: links.take(paths))
            steps.step("link: open gate", lambda: links.open_gate(taken))
        launch = steps.step(
            f"launcher ({mark})",
            lambda: host.runtime.launch(
                paths, root_fd=root_fd, listen_fd=listen_fd, cgroup=cgroup, link=link
            ),
        )
        container = steps.step(
            f"crun ({mark})",
            lambda: host.runtime.start(launch, ContainerSpec(hostname="box"), timeout_s=20),
        )
    if link is not None:
        link.close_namespace()
    box = Box(paths, cgroup, container, link)
    steps.taken_ms[f"create ({mark}), all"].append((time.perf_counter() - began) * 1e3)
    steps.step("first answer", lambda: box.sh("true"))
    return box


@contextmanager
def bare_crun(directory: Path) -> Iterator[Callable[[Steps], None]]:
    """`crun spec` of today with the same tree on a directory, in a cgroup2 view it accepts."""
    bundle, root = directory / "bundle", directory / "bare"
    shutil.copytree(materials().image.parent / "base", bundle / "rootfs", symlinks=True)
    command.run(["crun", "spec", f"--bundle={bundle}"], timeout_s=10)
    config = json.loads((bundle / "config.json").read_text())
    config["process"] |= {"terminal": False, "args": ["/bin/sleep", "1000"]}
    config["mounts"] = [m for m in config["mounts"] if m["type"] != "cgroup"]
    (bundle / "config.json").write_text(json.dumps(config))
    crun = ["crun", f"--root={root}", "--cgroup-manager=disabled"]
    count = iter(range(1_000_000))

    def run(steps: Steps) -> None:
        name = f"bare{next(count)}"
        argv = [*crun, "run", "--detach", f"--bundle={bundle}", name]
        syscall.mount("none", "/sys/fs/cgroup", "cgroup2")
        log = directory / "bare.log"
        steps.step("bare crun run", lambda: command.run(argv, timeout_s=20, log=log))
        command.run([*crun, "delete", "--force", name], timeout_s=20)
        syscall.umount2("/sys/fs/cgroup")

    yield run


def report(taken_ms: dict[str, list[float]]) -> None:
    for name, taken in taken_ms.items():
        ordered = sorted(taken)
        p50, p90 = statistics.median(taken), ordered[int(len(ordered) * 0.9)]
        print(f"{name:24} p50 {p50:7.2f}  p90 {p90:7.2f}  min {ordered[0]:7.2f} ms")


def measure(paths: NodePaths, directory: Path, rounds: int) -> None:
    enter_node_namespace(paths)
    node, steps = LibhostNode(paths.node, directory, materials()), Steps()
    try:
        with bare_crun(paths.live_dir) as bare:
            for _ in range(rounds):
                assert node.host.network is not None
                node.host.disk.refill([DISK], at_most=8)
                node.host.network.refill()
                bare(steps)
                boxes = [create(node, steps, network=network) for network in (False, True)]
                for box, mark in zip(boxes, ("none", "link"), strict=True):
                    steps.step(f"remove ({mark})", lambda box=box: node.remove(box))
    finally:
        node.close()
    report(steps.taken_ms)


def main() -> None:
    """In a child, since who has entered the node's namespace cannot remove it."""
    if len(sys.argv) == 4:
        node, directory, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
        measure(NodePaths(node, directory / "state", directory / "run"), directory, rounds)
        return
    rounds = sys.argv[1] if len(sys.argv) > 1 else "50"
    directory = Path(tempfile.mkdtemp(prefix="dsec-t"))
    paths = NodePaths(f"t{os.urandom(4).hex()}", directory / "state", directory / "run")
    argv = [sys.executable, "-m", "tests.kernel.libhost_steps", paths.node, str(directory), rounds]
    try:
        subprocess.run(argv, check=True)
    finally:
        remove_node_namespace(paths)
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
