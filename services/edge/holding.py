"""What one sandbox holds of its host, as a stack: acquired downwards, released in the reverse.

    directory -> layers -> network -> cgroup -> policy -> process

`start` acquires, `adoption` finds what a predecessor acquired; both end here, and both are undone
by the same `release`. Every release acts by the sandbox's name, does nothing where nothing is left,
and one that fails does not keep the next from running: what is left then is `reclaim`'s to find.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum
from typing import Final

import structlog

from libhost.cgroup import SandboxCgroup
from libhost.crun import Launch, Runtime, StartedContainer
from libhost.disk import Disk, WritableLayer
from libhost.net import Link
from libhost.paths import SandboxPaths

from .agent_link import AgentLink
from .death import ExitWatch
from .node import Node

_log = structlog.get_logger("edge.holding")

_EMPTY_TIMEOUT_S: Final = 10.0
_ABANDON_TIMEOUT_S: Final = 2.0


class Resource(StrEnum):
    """In the order of acquisition."""

    DIRECTORY = "directory"
    LAYERS = "layers"
    NETWORK = "network"
    CGROUP = "cgroup"
    POLICY = "policy"
    PROCESS = "process"


class Workbench:
    """Descriptors that only a start needs; closed at its end, however it ends.

    A step that outlives its time goes on in its thread. Nothing is closed under it, or a number
    that somebody else has got meanwhile might be: it closes everything itself when it ends.
    """

    def __init__(self) -> None:
        self.writable: WritableLayer | None = None
        self.listen_fd = -1
        self.root_fd = -1
        self._at_work = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        with self._at_work:
            try:
                yield
            finally:
                if self._closed:
                    self._close()

    def close(self) -> None:
        self._closed = True
        if self._at_work.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._at_work.release()

    def _close(self) -> None:
        if self.writable is not None:
            self.writable.close()
            self.writable = None
        for fd in (self.listen_fd, self.root_fd):
            if fd >= 0:
                os.close(fd)
        self.listen_fd = self.root_fd = -1


class Holding:
    """protected() -> acquire into the attributes -> keep, or unwound; release() ends it."""

    def __init__(self, node: Node, sandbox: SandboxPaths) -> None:
        self._node = node
        self.sandbox = sandbox
        self.agent = AgentLink(sandbox.agent_socket)
        self.workbench = Workbench()
        self.link: Link | None = None
        self.cgroup: SandboxCgroup | None = None
        self.policed = False
        self.launch: Launch | None = None  # from the runtime's launch until it may start
        self.process: StartedContainer | None = None
        self.exit: ExitWatch | None = None
        self.left_over: list[Resource] = []
        self._stack = AsyncExitStack()

    @asynccontextmanager
    async def protected(self) -> AsyncIterator[None]:
        """What is acquired inside is released again if the block fails, kept if it does not.

        All releases are registered at once, before the first acquisition, because acquisitions run
        side by side and a failed one may have got half way.
        """
        async with AsyncExitStack() as stack:
            for resource, undo in self._releases():
                stack.push_async_callback(self._attempt, resource, undo)
            try:
                yield
            finally:
                self.workbench.close()
            self._stack = stack.pop_all()

    async def release(self) -> list[Resource]:
        """Give everything back; returns what could not be. Idempotent."""
        await self._stack.aclose()
        return self.left_over

    def adopt(self, process: StartedContainer, cgroup: SandboxCgroup, link: Link | None) -> None:
        """Hold what a predecessor acquired for a sandbox that lives."""
        self.process, self.cgroup, self.link = process, cgroup, link
        self.policed = True
        self._stack.pop_all()
        for resource, undo in self._releases():
            self._stack.push_async_callback(self._attempt, resource, undo)
        self.watch_exit()

    async def leave(self) -> None:
        """Let go of descriptors only: the sandbox lives on for a successor edge."""
        self._stack.pop_all()
        self._close_process()
        await self.agent.close()

    def watch_exit(self) -> None:
        if self.process is not None:
            self.exit = ExitWatch(self.process.pidfd)

    def _releases(self) -> tuple[tuple[Resource, Callable[[], Awaitable[None]]], ...]:
        return (
            (Resource.DIRECTORY, self._discard_directory),
            (Resource.LAYERS, self._release_layers),
            (Resource.NETWORK, self._remove_network),
            (Resource.CGROUP, self._remove_cgroup),
            (Resource.POLICY, self._remove_policy),
            (Resource.PROCESS, self._end_process),
        )

    async def _attempt(self, resource: Resource, undo: Callable[[], Awaitable[None]]) -> None:
        try:
            await undo()
        except Exception as err:
            self.left_over.append(resource)
            _log.warning("release failed", sandbox=self.sandbox.sandbox_id, resource=resource,
                         error=repr(err))  # fmt: skip

    async def _end_process(self) -> None:
        await self.agent.close()
        launch, self.launch = self.launch, None
        try:
            if self.cgroup is not None:
                runtime = self._node.host.runtime
                await self._node.run(_end_processes, self.cgroup, runtime, self.sandbox, launch)
        finally:
            self._close_process()

    async def _remove_policy(self) -> None:
        if self.policed:
            await self._node.policy.remove(self.sandbox.sandbox_id)
            self.policed = False

    async def _remove_cgroup(self) -> None:
        if self.cgroup is not None:
            await self._node.run(self.cgroup.remove)
            self.cgroup = None

    async def _remove_network(self) -> None:
        if self.link is not None and self._node.host.network is not None:
            self.link.close_namespace()
            await self._node.run(self._node.host.network.remove, self.sandbox)
            self.link = None

    async def _release_layers(self) -> None:
        await self._node.layers.release(self.sandbox.sandbox_id)

    async def _discard_directory(self) -> None:
        await self._node.run(_discard, self._node.host.disk, self.sandbox)

    def _close_process(self) -> None:
        if self.exit is not None:
            self.exit.close()
            self.exit = None
        if self.process is not None:
            with contextlib.suppress(OSError):
                os.close(self.process.pidfd)
            self.process = None


def _discard(disk: Disk, sandbox: SandboxPaths) -> None:
    disk.discard(sandbox)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(sandbox.run_dir)


def _end_processes(
    cgroup: SandboxCgroup, runtime: Runtime, sandbox: SandboxPaths, launch: Launch | None
) -> None:
    if launch is not None:  # until it has ended it may put one more process into the cgroup
        with contextlib.suppress(TimeoutError):
            launch.abandon(timeout_s=_ABANDON_TIMEOUT_S)
    cgroup.kill()
    cgroup.wait_empty(timeout_s=_EMPTY_TIMEOUT_S)
    runtime.delete(sandbox)
