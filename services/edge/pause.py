"""Pausing and resuming, and the rule of which verbs resume.

The snapshotter freezes and takes memory back; where it is away the edge freezes plainly, and it can
always thaw without it. A verb that needs running tasks enters `active`, which resumes first and
holds the idle clock while it lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from libdsec.errors import DeathReason, SandboxDead, Unavailable
from libdsec.wire.sandbox import PauseResult, ResumeResult, State
from libdsec.wire.snapshot import FreezeRequest, Frozen, ThawRequest
from libhost.cgroup import SandboxCgroup

from .lifecycle import Observer
from .node import Node
from .sandbox import Sandbox
from .start import hosts_text
from .tasks import Tasks

_FREEZE_TIMEOUT_S: Final = 5.0
_RECLAIM_DEADLINE_S: Final = 10.0


class Pauses:
    """pause, resume, active; each sandbox's own transitions exclude one another."""

    def __init__(self, node: Node, tasks: Tasks, observe: Observer) -> None:
        self._node = node
        self._tasks = tasks
        self._observe = observe

    @asynccontextmanager
    async def active(self, sandbox: Sandbox) -> AsyncIterator[None]:
        """For the time of a verb that needs running tasks: resumed, and not idle.

        Raises:
            SandboxDead: it ended before it could be resumed.
            Unavailable: it cannot be resumed now.
        """
        sandbox.clocks.begin(self._node.clock.monotonic_s())
        try:
            if sandbox.paused or sandbox.transition.locked():
                await self.resume(sandbox)
            yield
        finally:
            sandbox.clocks.end(self._node.clock.monotonic_s())

    async def pause(self, sandbox: Sandbox, *, reclaim: bool) -> PauseResult:
        """Carried through once it is begun, whatever becomes of the caller."""
        work = self._pause(sandbox, reclaim)
        return await asyncio.shield(self._tasks.spawn(work, name=f"pause {sandbox.id}"))

    async def resume(self, sandbox: Sandbox) -> ResumeResult:
        """As `pause`."""
        work = self._resume(sandbox)
        return await asyncio.shield(self._tasks.spawn(work, name=f"resume {sandbox.id}"))

    async def _pause(self, sandbox: Sandbox, reclaim: bool) -> PauseResult:
        async with sandbox.transition:
            _check_usable(sandbox)
            if sandbox.paused:
                stats = await self._node.run(_cgroup(sandbox).stats)
                resident = stats.memory.current_bytes
                return PauseResult(
                    state=State.PAUSED, frozen_ms=0, reclaimed_bytes=0, resident_bytes=resident
                )
            began = self._node.clock.monotonic_s()
            frozen = await self._freeze(sandbox, reclaim)
            _check_usable(sandbox)
            now = self._node.clock.monotonic_s()
            sandbox.clocks.pause(now, already_s=now - began)
            sandbox.update(
                self._node.records,
                state=State.PAUSED,
                lived_s=sandbox.clocks.life.read(now),
                since_mono=began,
            )
            self._observe(sandbox, State.PAUSED, frozen.how)
            return PauseResult(
                state=State.PAUSED,
                frozen_ms=frozen.frozen_ms,
                reclaimed_bytes=frozen.reclaimed_bytes,
                resident_bytes=frozen.resident_bytes,
            )

    async def _resume(self, sandbox: Sandbox) -> ResumeResult:
        async with sandbox.transition:
            _check_usable(sandbox)
            if not sandbox.paused:
                return ResumeResult(state=sandbox.status.state, paused_s=0.0, thaw_ms=0.0)
            began = self._node.clock.monotonic_s()
            paused_s = began - sandbox.status.since_mono
            await self._thaw(sandbox, paused_s)
            now = self._node.clock.monotonic_s()
            sandbox.clocks.resume(now)
            sandbox.update(
                self._node.records,
                state=State.READY,
                since_mono=now,
                lived_s=sandbox.clocks.life.read(now),
            )
            self._observe(sandbox, State.READY, "resumed")
            await self._write_hosts(sandbox)
            return ResumeResult(state=State.READY, paused_s=paused_s, thaw_ms=(now - began) * 1000)

    async def _freeze(self, sandbox: Sandbox, reclaim: bool) -> Frozen:
        frozen = await self._node.snapshotter.freeze(
            FreezeRequest(
                sandbox_id=sandbox.id,
                lane=sandbox.lane,
                reclaim=reclaim,
                deadline_s=_RECLAIM_DEADLINE_S,
            )
        )
        if frozen is not None:
            return frozen
        began = self._node.clock.monotonic_s()
        cgroup = _cgroup(sandbox)
        try:
            resident = await self._node.run(_freeze_plainly, cgroup)
        except (OSError, TimeoutError) as err:
            if sandbox.usable:  # half frozen is neither paused nor running
                await self._node.run(cgroup.thaw)
            raise Unavailable(
                f"sandbox {sandbox.id} could not be frozen: {err}",
                hint="a process that waits for a disk or a store cannot be; try again",
                retry_after_s=5.0,
            ) from err
        frozen_ms = (self._node.clock.monotonic_s() - began) * 1000
        why = "none: the snapshotter is away"
        return Frozen(frozen_ms=frozen_ms, resident_bytes=resident, how=why)

    async def _thaw(self, sandbox: Sandbox, paused_s: float) -> None:
        """The agent is told first how long it slept: the message waits in its socket, so that no
        command's deadline is looked at with the pause in it. A frozen agent cannot greet a new
        connection: after a restart of the edge it is told as soon as it can be."""
        channel = sandbox.holding.agent.open_channel
        if channel is not None:
            channel.frozen_for(paused_s)
        thawed = await self._node.snapshotter.thaw(
            ThawRequest(sandbox_id=sandbox.id, lane=sandbox.lane)
        )
        if thawed is None:
            try:
                await self._node.run(_cgroup(sandbox).thaw)
            except OSError as err:
                raise Unavailable(
                    f"sandbox {sandbox.id} could not be thawed: {err}", retry_after_s=1.0
                ) from err
        if channel is None:
            (await sandbox.holding.agent.channel()).frozen_for(paused_s)

    async def _write_hosts(self, sandbox: Sandbox) -> None:
        """Names that a policy change brought while nobody could write them."""
        if not sandbox.status.hosts_written:
            await write_hosts(sandbox)
            sandbox.update(self._node.records, hosts_written=True)


async def write_hosts(sandbox: Sandbox) -> None:
    """Put the names of the policy in force into the running sandbox's /etc/hosts.

    Raises:
        Unavailable: the agent did not take it.
    """
    hostname = sandbox.id.rpartition("_")[2]
    channel = await sandbox.holding.agent.channel()
    text = hosts_text(hostname, sandbox.status.hosts)
    try:
        await channel.files.write("/etc/hosts", text.encode())
    except OSError as err:
        raise Unavailable(f"/etc/hosts of {sandbox.id} could not be written: {err}") from err


def _check_usable(sandbox: Sandbox) -> None:
    if not sandbox.usable:
        reason = sandbox.status.ending or DeathReason.KILLED
        raise SandboxDead(f"sandbox {sandbox.id} is gone ({reason.value})", reason=reason)


def _cgroup(sandbox: Sandbox) -> SandboxCgroup:
    cgroup = sandbox.holding.cgroup
    if cgroup is None:
        raise SandboxDead(f"sandbox {sandbox.id} is gone", reason=DeathReason.KILLED)
    return cgroup


def _freeze_plainly(cgroup: SandboxCgroup) -> int:
    cgroup.freeze(timeout_s=_FREEZE_TIMEOUT_S)
    return cgroup.stats().memory.current_bytes
