"""A node made of libhost alone: one busybox layer, a stand-in agent, sandboxes by name."""

from __future__ import annotations

import atexit
import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from libhost.cgroup import CgroupLimits, NodeCgroups, SandboxCgroup, SchedClass
from libhost.crun import ContainerSpec, Launch, Runtime, StartedContainer, bind_agent_socket
from libhost.disk import DiskLimits, empty_trash, open_disk
from libhost.erofs import build_image
from libhost.layer import MountedLayer, mount_layer, umount_layer
from libhost.net import Link, NodeNetwork
from libhost.overlay import apply, plan_overlay
from libhost.paths import NodePaths, SandboxPaths
from libhost.probe import probe_host
from libhost.sweep import Host, Remains, find_remains, remove_sandbox

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build"
REMOVE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Materials:
    """What every node is made of, built once: an agent and a base layer."""

    agent: Path
    image: Path
    digest: str


@lru_cache(maxsize=2)
def materials(directory: Path | None = None) -> Materials:
    """Made once per process, or once in a directory that several processes share."""
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix="dsec-t"))
        atexit.register(shutil.rmtree, directory)
    image, agent = directory / "base.erofs", directory / "shell_agent"
    if not image.exists():
        make_base(directory / "base", directory)
        compiled("shell_agent.c", directory)
        build_image(directory / "base", image)
    return Materials(agent, image, hashlib.sha256(image.read_bytes()).hexdigest())


def compiled(source: str, into: Path) -> Path:
    """A static program from a C file beside this one."""
    target = into / source.removesuffix(".c")
    argv = ["gcc", "-O1", "-static", "-o", str(target), str(HERE / source)]
    subprocess.run(argv, check=True, capture_output=True)
    return target


def make_base(tree: Path, programs: Path) -> None:
    """busybox under all its names, and the program that tries doors."""
    for name in ("bin", "etc", "root", "tmp", "mnt", "proc", "sys", "dev"):
        (tree / name).mkdir(parents=True)
    (tree / "tmp").chmod(0o1777)
    shutil.copy2("/bin/busybox", tree / "bin/busybox")
    shutil.copy2(compiled("reach.c", programs), tree / "bin/reach")
    applets = subprocess.run(["/bin/busybox", "--list"], check=True, capture_output=True, text=True)
    for applet in applets.stdout.split():
        if applet != "busybox":
            (tree / "bin" / applet).symlink_to("busybox")
    (tree / "etc/large").write_bytes(os.urandom(1 << 20))
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")


@dataclass
class Box:
    """One running sandbox."""

    paths: SandboxPaths
    cgroup: SandboxCgroup
    container: StartedContainer
    link: Link | None

    def sh(self, script: str, *, timeout_s: float = 20.0) -> str:
        """What the script printed, inside."""
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(timeout_s)
            channel.connect(str(self.paths.agent_socket))
            channel.sendall(script.encode())
            channel.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: channel.recv(65536), b"")).decode(errors="replace")

    def reach(self, attempt: str) -> str:
        return self.sh(f"reach {attempt}").strip()


class LibhostNode:
    """open -> start (any number) -> close, which proves itself by the caller's leak check."""

    def __init__(self, name: str, directory: Path, made: Materials) -> None:
        self._materials = made
        self.name = name
        self.directory = directory
        self.paths = NodePaths(name, directory / "state", directory / "run")
        self.paths.state_dir.mkdir(exist_ok=True)
        self.paths.live_dir.mkdir(parents=True, exist_ok=True)
        found = probe_host(self.paths.state_dir)
        assert found.problems == ()
        assert found.cgroups is not None
        assert found.disk is not None
        assert found.overlay is not None
        self.mode = found.overlay
        cgroups = NodeCgroups(found.cgroups, self.paths)
        cgroups.ensure()
        self.host = Host(
            paths=self.paths,
            cgroups=cgroups,
            disk=open_disk(self.paths, found.disk, self.mode, pool_size=2),
            network=self._network(),
            runtime=Runtime(
                self.paths,
                crun=Path("/usr/bin/crun"),
                launcher=BUILD / "dsec-launch",
                agent=made.agent,
            ),
        )

    def _network(self) -> NodeNetwork:
        third = hashlib.blake2b(self.name.encode()).digest()[0]
        network = NodeNetwork(self.paths, IPv4Network(f"100.98.{third}.0/24"), pool_size=1)
        network.ensure()
        return network

    @cached_property
    def base(self) -> MountedLayer:
        made = self._materials
        return mount_layer(self.paths, made.digest, made.image)

    def new_id(self) -> str:
        return f"{self.name}_aaaaaa_{secrets.token_hex(6)}"

    def start(self, *, spec: ContainerSpec | None = None, **how: Any) -> Box:
        """``how``: as for :meth:`launch`."""
        launch, cgroup, link = self.launch(**how)
        spec = spec or ContainerSpec(hostname="box")
        container = self.host.runtime.start(launch, spec, timeout_s=20)
        if link is not None:
            link.close_namespace()
        return Box(launch.sandbox, cgroup, container, link)

    def launch(
        self,
        *,
        sandbox_id: str = "",
        limits: CgroupLimits | None = None,
        disk: DiskLimits | None = None,
        sched: SchedClass = SchedClass.LS,
        network: bool = False,
        above: Sequence[MountedLayer] = (),
    ) -> tuple[Launch, SandboxCgroup, Link | None]:
        paths = self.paths.sandbox(sandbox_id or self.new_id())
        with ExitStack() as stack:
            writable = self.host.disk.create(paths, disk or DiskLimits(64))
            stack.callback(writable.close)
            listen_fd = bind_agent_socket(paths)
            stack.callback(os.close, listen_fd)
            lowers = [self.base, *above]
            plan = plan_overlay(lowers, writable.upper, writable.work, self.mode)
            root_fd = apply(plan)
            stack.callback(os.close, root_fd)
            cgroup = self.host.cgroups.create(
                paths.sandbox_id, sched, limits or CgroupLimits(memory_mib=256, pids=128)
            )
            link = self._open_link(paths) if network else None
            launch = self.host.runtime.launch(
                paths, root_fd=root_fd, listen_fd=listen_fd, cgroup=cgroup, link=link
            )
        return launch, cgroup, link

    def _open_link(self, paths: SandboxPaths) -> Link:
        assert self.host.network is not None
        link = self.host.network.take(paths)
        self.host.network.open_gate(link)
        return link

    def remove(self, box: Box) -> list[Exception]:
        os.close(box.container.pidfd)
        return self.remove_again(box)

    def remove_again(self, box: Box) -> list[Exception]:
        remains = Remains(box.paths.slot, box.paths.sandbox_id, frozenset())
        return remove_sandbox(self.host, remains, timeout_s=REMOVE_TIMEOUT_S)

    def close(self) -> None:
        """All errors are raised at the end, after everything was tried."""
        errors: list[Exception] = []
        for remains in find_remains(self.host).values():
            errors += remove_sandbox(self.host, remains, timeout_s=REMOVE_TIMEOUT_S)
        self.host.disk.close()
        if self.host.network is not None:
            self.host.network.close()
            self.host.network.remove_gateway()
        self.host.runtime.close()
        if "base" in self.__dict__:
            umount_layer(self.paths, self.base)
        while empty_trash(self.paths, budget_files=1000):
            pass
        self.host.cgroups.remove()
        if errors:
            raise ExceptionGroup("left after the test", errors)


@contextmanager
def libhost_node(name: str, directory: Path) -> Iterator[LibhostNode]:
    node = LibhostNode(name, directory, materials())
    try:
        yield node
    finally:
        node.close()
