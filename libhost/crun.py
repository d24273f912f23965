"""Start a container with crun, from a detached root, joined cgroups and inherited descriptors.

The container's first process is the agent, executed from a sealed memfd so that no file of ours is
in the sandbox's tree. It inherits::

    fd 3   its listening unix socket, bound by the caller on the host side
    fd 4   the directory of its delegated cgroup (``box``)
    fd 5   the memfd it is executed from

``dsec-launch`` runs between us and crun: it takes a mount namespace of its own, puts the root
there, joins the cgroups and the network namespace, then becomes crun. Nothing of that is visible
outside, so a caller killed at any moment leaves no mount behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libhost.cgroup import SandboxCgroup
from libhost.net import Link
from libhost.paths import NodePaths, SandboxPaths


@dataclass(frozen=True)
class ContainerSpec:
    """What the config of a container is made of; ``agent_argv`` follows the agent's own flags."""

    hostname: str
    shm_mib: int = 64
    max_open_files: int = 65536
    env: Mapping[str, str] = field(default_factory=dict)
    agent_argv: Sequence[str] = ()


@dataclass(frozen=True)
class StartedContainer:
    """PID 1 as the host sees it; ``pidfd`` is owned by the holder."""

    pid: int
    pidfd: int


def build_config(spec: ContainerSpec, *, own_netns: bool) -> dict[str, object]:
    """The OCI configuration; pure. ``own_netns``: the runtime makes one with only ``lo``."""
    raise NotImplementedError


def load_agent(path: Path) -> int:
    """The agent's binary as a sealed memfd; one serves every container of the process."""
    raise NotImplementedError


class Runtime:
    """crun with this node's directories."""

    def __init__(self, paths: NodePaths, *, crun: Path, launcher: Path, agent_fd: int) -> None:
        raise NotImplementedError

    def start(
        self,
        sandbox: SandboxPaths,
        spec: ContainerSpec,
        *,
        root_fd: int,
        listen_fd: int,
        cgroup: SandboxCgroup,
        link: Link | None,
        timeout_s: float,
    ) -> StartedContainer:
        """Returns when PID 1 has been executed. CommandFailedError carries crun's last words."""
        raise NotImplementedError

    def find(self, sandbox: SandboxPaths) -> StartedContainer | None:
        """PID 1 of a container a predecessor started, None if it is not running."""
        raise NotImplementedError

    def delete(self, sandbox: SandboxPaths) -> None:
        """Forget a container whose processes are gone; idempotent."""
        raise NotImplementedError


def bind_agent_socket(sandbox: SandboxPaths, *, backlog: int = 128) -> int:
    """Create the run directory and the listening socket in it; returns its descriptor."""
    raise NotImplementedError
