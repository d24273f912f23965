"""Start a container with crun, from a detached root, joined cgroups and inherited descriptors.

The container's first process is the agent, executed from a sealed memfd so that no file of ours is
in the sandbox's tree. It inherits::

    fd 3   its listening unix socket, bound by the caller on the host side
    fd 4   the directory of its delegated cgroup (``box``)
    fd 5   the memfd it is executed from

``dsec-launch`` runs between us and crun: it takes a mount namespace of its own, puts the root
there, joins the cgroups and the network namespace, then becomes crun. Nothing of that is visible
outside, so a caller killed at any moment leaves no mount behind. crun itself runs from a sealed
memfd too, which spares it the copy it otherwise makes of itself at every start.

All of that can be done before it is allowed: crun reads its configuration from a pipe. Until it is
written there is no container, and a pipe that closes without one, also because the caller died,
ends crun with an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from libhost import command
from libhost.cgroup import SandboxCgroup
from libhost.command import Child, CommandFailedError
from libhost.errors import HostError
from libhost.net import Link
from libhost.oci import AGENT_FD, ContainerSpec, build_config
from libhost.paths import NodePaths, SandboxPaths
from libhost.pidfd import is_alive

__all__ = [
    "ContainerSpec",
    "Launch",
    "Runtime",
    "StartedContainer",
    "bind_agent_socket",
    "build_config",
    "load_program",
]

_LISTEN_FD, _CGROUP_FD = 3, 4
_CONFIG_FD = 6
_ROOT_FD, _NETNS_FD, _CRUN_FD = 7, 8, 9
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_SECCOMP_FILTERING = "Seccomp:\t2"


@dataclass(frozen=True)
class StartedContainer:
    """PID 1 as the host sees it; ``pidfd`` is owned by the holder."""

    pid: int
    pidfd: int


@dataclass(frozen=True)
class Launch:
    """A runtime that waits for its configuration: :meth:`Runtime.launch` -> :meth:`Runtime.start`
    or ``abandon``, exactly one of them."""

    sandbox: SandboxPaths
    child: Child
    config_fd: int
    own_netns: bool

    def configure(self, config: Mapping[str, object]) -> None:
        with (
            contextlib.suppress(BrokenPipeError),  # it has ended: its last words say why
            os.fdopen(self.config_fd, "w") as pipe,
        ):
            pipe.write(json.dumps(config))

    def abandon(self, *, timeout_s: float) -> None:
        """Returns when the launcher has ended; what it left in the cgroup is the caller's to kill.
        TimeoutError: it did not and was killed."""
        os.close(self.config_fd)
        with contextlib.suppress(CommandFailedError):
            command.finish(self.child, timeout_s=timeout_s)


def load_program(path: Path) -> int:
    """A program as a sealed memfd: it can be executed by descriptor and changed by nobody."""
    fd = os.memfd_create(path.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with path.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            while size > 0:
                size -= os.sendfile(fd, source.fileno(), None, size)
        os.fchmod(fd, 0o555)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Runtime:
    """crun with this node's directories."""

    def __init__(self, paths: NodePaths, *, crun: Path, launcher: Path, agent: Path) -> None:
        self._root = paths.crun_root
        self._launcher = str(launcher)
        self._crun_fd = load_program(crun)
        self._agent_fd = load_program(agent)
        # Raising a hard limit would need CAP_SYS_RESOURCE, which an edge need not have.
        self._max_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def close(self) -> None:
        os.close(self._crun_fd)
        os.close(self._agent_fd)

    def launch(
        self,
        sandbox: SandboxPaths,
        *,
        root_fd: int,
        listen_fd: int,
        cgroup: SandboxCgroup,
        link: Link | None,
    ) -> Launch:
        """Bring crun to where it reads its configuration; nothing runs before :meth:`start`.

        The run directory exists (see :func:`bind_agent_socket`).
        """
        sandbox.config.symlink_to(f"/proc/self/fd/{_CONFIG_FD}")
        sandbox.rootfs.mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            box_fd = cgroup.open_box()
            stack.callback(os.close, box_fd)
            reading, writing = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, reading)
            fds = {
                _LISTEN_FD: listen_fd,
                _CGROUP_FD: box_fd,
                AGENT_FD: self._agent_fd,
                _CONFIG_FD: reading,
                _ROOT_FD: root_fd,
                _CRUN_FD: self._crun_fd,
            }
            if link is not None:
                fds[_NETNS_FD] = link.namespace_fd
            argv = self._argv(sandbox, cgroup, has_netns=link is not None)
            try:
                child = command.begin(argv, fds=fds, log=sandbox.run_dir / "start.log")
            except BaseException:
                os.close(writing)
                raise
        return Launch(sandbox, child, writing, own_netns=link is None)

    def start(self, launch: Launch, spec: ContainerSpec, *, timeout_s: float) -> StartedContainer:
        """Returns when PID 1 has been executed. CommandFailedError carries crun's last words.

        After a failure whatever was started is in the cgroup, and is the caller's to kill.
        """
        files = min(spec.max_open_files, self._max_open_files)
        spec = dataclasses.replace(spec, max_open_files=files)
        launch.configure(build_config(spec, own_netns=launch.own_netns))
        command.finish(launch.child, timeout_s=timeout_s)
        started = self.find(launch.sandbox)
        if started is None:
            raise HostError(f"the first process of {launch.sandbox.sandbox_id} ended at once")
        if _SECCOMP_FILTERING not in Path(f"/proc/{started.pid}/status").read_text():
            os.close(started.pidfd)
            raise HostError(
                f"crun started {launch.sandbox.sandbox_id} without its system call filter"
            )
        return started

    def _argv(self, sandbox: SandboxPaths, cgroup: SandboxCgroup, *, has_netns: bool) -> list[str]:
        launch = [
            self._launcher,
            str(_ROOT_FD),
            str(sandbox.rootfs),
            str(_NETNS_FD if has_netns else -1),
            str(_CRUN_FD),
            "1" if cgroup.hybrid else "0",
            str(cgroup.box),
            *map(str, cgroup.join_files),
            "--",
        ]
        options = [f"--root={self._root}", "--cgroup-manager=disabled"]
        # PID 1 keeps whatever standard output crun has, so errors go to a file by another way.
        options.append(f"--log={sandbox.run_dir / 'start.log'}")
        run = ["run", "--detach", f"--preserve-fds={AGENT_FD - 2}", f"--bundle={sandbox.run_dir}"]
        return [
            *launch,
            "crun",
            *options,
            *run,
            f"--pid-file={sandbox.pid_file}",
            sandbox.sandbox_id,
        ]

    def find(self, sandbox: SandboxPaths) -> StartedContainer | None:
        """PID 1 of a container a predecessor started, None if it has exited, reaped or not."""
        try:
            pid = int(sandbox.pid_file.read_text())
            pidfd = os.pidfd_open(pid)
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None
        # The pidfd holds the number from here on; its cgroup says whether it is still ours.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ours = f"/{sandbox.sandbox_id}/" in Path(f"/proc/{pid}/cgroup").read_text()
            if ours and is_alive(pidfd):
                return StartedContainer(pid, pidfd)
        os.close(pidfd)
        return None

    def delete(self, sandbox: SandboxPaths) -> None:
        """Forget a container whose processes are gone; idempotent.

        With its cgroup manager disabled and no hooks, ``crun delete`` would do just this, in a
        process of its own.
        """
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(sandbox.crun_dir)


def bind_agent_socket(sandbox: SandboxPaths, *, backlog: int = 128) -> int:
    """Create the run directory and the listening socket in it; returns its descriptor."""
    sandbox.run_dir.mkdir(mode=0o700)
    sandbox.id_file.write_text(sandbox.sandbox_id)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(sandbox.agent_socket))
        listener.listen(backlog)
        return listener.detach()
