"""Every name on the host that derives from a sandbox or a node, in one place.

The grammar, for node ``n`` and sandbox id ``s``::

    slot                  first 10 characters of lower-case base32(blake2b(s)), [a-z2-7]{10}
    <state>/sandboxes/<s>/       what belongs to the sandbox and survives a reboot
    <state>/disks/               prepared writable images nobody owns yet
    <state>/trash/               what is waiting to be deleted; nothing else may read it
    <run>/ns/mnt                 the node's pinned mount namespace
    <run>/live/                  a tmpfs in that namespace: nothing below is seen outside of it
    <run>/live/<slot>/           bundle, runtime sockets
    <run>/live/<slot>/agent.sock the agent's listening socket
    <run>/live/crun/<s>/         the container runtime's state
    <run>/live/layers/<digest>/  a mounted layer
    cgroup dsec-<n>/{ls,be}/<s>  in every hierarchy used
    interface ds<slot>           host end of the sandbox's veth; dsg<slot of n> the node's gateway

A slot exists because an interface name has at most 15 characters and a socket path 107. The one
direction that matters is id -> slot; the way back is ``<run>/live/<slot>/id``.
Nothing here touches the host.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SLOT_LENGTH = 10
SLOT_PATTERN = re.compile(r"[a-z2-7]{10}")
_NODE_PATTERN = re.compile(r"[a-z0-9-]{1,24}")
_SANDBOX_PATTERN = re.compile(r"[a-z0-9-]{1,24}_[a-z0-9]{1,12}_[a-z0-9]{1,24}")
_SOCKET_PATH_MAX = 107


def slot_of(name: str) -> str:
    """The short name that stands for ``name`` where the kernel limits the length."""
    digest = hashlib.blake2b(name.encode()).digest()
    return base64.b32encode(digest)[:SLOT_LENGTH].decode().lower()


@dataclass(frozen=True)
class SandboxPaths:
    """Where one sandbox lives."""

    sandbox_id: str
    state_dir: Path
    run_dir: Path
    crun_dir: Path

    @cached_property
    def slot(self) -> str:
        return slot_of(self.sandbox_id)

    @property
    def interface(self) -> str:
        """Host end of the veth pair."""
        return f"ds{self.slot}"

    @property
    def agent_socket(self) -> Path:
        return self.run_dir / "agent.sock"

    @property
    def id_file(self) -> Path:
        """Says whose slot this is: written first, so that a sweep can always name its find."""
        return self.run_dir / "id"

    @property
    def config(self) -> Path:
        return self.run_dir / "config.json"

    @property
    def rootfs(self) -> Path:
        """Empty directory; the root is mounted on it only in the launcher's own namespace."""
        return self.run_dir / "rootfs"

    @property
    def pid_file(self) -> Path:
        return self.run_dir / "pid"

    @property
    def disk_image(self) -> Path:
        return self.state_dir / "disk.img"

    @property
    def disk_dir(self) -> Path:
        """Writable directory (quota mode) or, where only paths will do, the image's mount point."""
        return self.state_dir / "disk"


@dataclass(frozen=True)
class NodePaths:
    """Where one node's edge keeps what; two nodes on a host differ in all three fields."""

    node: str
    state_dir: Path
    run_dir: Path

    def __post_init__(self) -> None:
        if not _NODE_PATTERN.fullmatch(self.node):
            raise ValueError(f"node name {self.node!r} is not of the form [a-z0-9-]{{1,24}}")
        longest = len(str(self.run_dir)) + len("/live//agent.sock") + SLOT_LENGTH
        if longest > _SOCKET_PATH_MAX:
            raise ValueError(
                f"run directory {self.run_dir} is too long: a socket below it would have "
                f"{longest} characters, the kernel takes {_SOCKET_PATH_MAX}"
            )

    def sandbox(self, sandbox_id: str) -> SandboxPaths:
        if not _SANDBOX_PATTERN.fullmatch(sandbox_id):
            raise ValueError(f"sandbox id {sandbox_id!r} is not <node>_<incarnation>_<random>")
        return SandboxPaths(
            sandbox_id=sandbox_id,
            state_dir=self.sandboxes_dir / sandbox_id,
            run_dir=self.live_dir / slot_of(sandbox_id),
            crun_dir=self.crun_root / sandbox_id,
        )

    @property
    def cgroup_name(self) -> str:
        return f"dsec-{self.node}"

    @property
    def gateway_interface(self) -> str:
        return f"dsg{slot_of(self.node)}"

    @property
    def sandboxes_dir(self) -> Path:
        return self.state_dir / "sandboxes"

    @property
    def disks_dir(self) -> Path:
        return self.state_dir / "disks"

    @property
    def trash_dir(self) -> Path:
        return self.state_dir / "trash"

    @property
    def namespace_pin(self) -> Path:
        return self.run_dir / "ns" / "mnt"

    @property
    def live_dir(self) -> Path:
        """What exists for as long as the node's namespace does."""
        return self.run_dir / "live"

    @property
    def layers_dir(self) -> Path:
        return self.live_dir / "layers"

    @property
    def crun_root(self) -> Path:
        return self.live_dir / "crun"

    @property
    def lock_file(self) -> Path:
        """Held for life by the node's one edge."""
        return self.run_dir / "edge.lock"

    def layer_mount(self, digest: str) -> Path:
        return self.layers_dir / digest
