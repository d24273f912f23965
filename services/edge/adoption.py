"""At a start: take over what a predecessor's sandboxes hold, and learn how the others ended.

What the journal names and the host confirms (the same process, by pid and start time, in its own
cgroup) lives on: held again, its clocks continued, its agent asked what runs. What the journal
names and the host lacks has died meanwhile, and its reason is judged from what is left to see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog
from pydantic import ValidationError

from libdsec.errors import DeathReason, DSecError
from libdsec.wire.sandbox import State
from libhost.cgroup import SandboxCgroup
from libhost.crun import StartedContainer
from libhost.net import Link
from libhost.pidfd import ExitStatus, ProcessIdentity, open_process

from .agent import ProcessState
from .clocks import Clocks
from .death import Evidence, judge
from .exec import Execs
from .holding import Holding
from .journal import Journal
from .lifecycle import Lifecycle
from .node import Node
from .placement import PREFIX, Fate
from .placement.records import read_records
from .record import Dead, Origin, Status
from .sandbox import Sandbox
from .table import Table
from .tasks import Tasks

_log = structlog.get_logger("edge.adoption")


def held_layers(alive: list[tuple[Origin, Status]]) -> dict[str, tuple[str, ...]]:
    """Which layers the journal says are in use: sandbox id -> digests."""
    return {origin.sandbox_id: origin.digests for origin, _ in alive}


def promises(journal: Journal) -> list[tuple[str, bytes]]:
    """The placement ledger's own entries; what cannot be read is set aside."""
    readable = []
    for key, value in journal.items(PREFIX):
        try:
            read_records([(key, value)])
        except ValidationError:
            journal.set_aside(key)
        else:
            readable.append((key, value))
    return readable


@dataclass(frozen=True)
class Found:
    """What lives of a sandbox, as the host shows it."""

    process: StartedContainer
    cgroup: SandboxCgroup
    link: Link | None
    frozen: bool
    oom_kills: int  # so far; whoever was told of them is not to be told again


class Adoption:
    """adopt() once, before anything is served; connect() when the agents may be spoken to."""

    def __init__(
        self, node: Node, table: Table, lifecycle: Lifecycle, execs: Execs, tasks: Tasks
    ) -> None:
        self._node = node
        self._table = table
        self._lifecycle = lifecycle
        self._execs = execs
        self._tasks = tasks

    async def adopt(self, alive: list[tuple[Origin, Status]]) -> None:
        for origin, status in alive:
            found = await self._node.run(self._find, origin, status)
            if found is None:
                await self._bury(origin, status)
            else:
                self._hold(origin, status, found)

    def fates(self, dead: set[str]) -> Mapping[str, Fate]:
        """What the placement ledger has to know of every sandbox that was ever ready."""
        fates = dict.fromkeys(dead, Fate.DEAD)
        fates |= {s.id: Fate.RUNNING for s in self._table}
        return fates

    def go_on(self) -> None:
        """Watch, expire and end what was adopted; finish what a predecessor had begun to end."""
        for sandbox in self._table:
            if not sandbox.journaled:
                continue  # it is being started anew, and has no agent yet
            self._lifecycle.watch(sandbox)
            if sandbox.status.ending is not None:
                self._tasks.spawn(
                    self._lifecycle.end(sandbox, sandbox.status.ending, "begun before a restart"),
                    name=f"end {sandbox.id}",
                )
            elif not sandbox.paused:
                self._tasks.spawn(self._greet(sandbox), name=f"greet {sandbox.id}")

    def _find(self, origin: Origin, status: Status) -> Found | None:
        """The living parts, or None if its first process is gone. Blocking."""
        process, host = status.process, self._node.host
        if process is None or process.boot_id != self._node.boot_id:
            return None
        try:
            cgroup = host.cgroups.open(origin.sandbox_id)
            pidfd = open_process(ProcessIdentity(process.pid, process.start_ticks))
        except (ProcessLookupError, FileNotFoundError):
            return None
        paths = host.paths.sandbox(origin.sandbox_id)
        link = host.network.find(paths) if host.network is not None else None
        oom_kills = cgroup.stats().memory.oom_kills
        container = StartedContainer(process.pid, pidfd)
        return Found(container, cgroup, link, cgroup.is_frozen(), oom_kills)

    def _hold(self, origin: Origin, status: Status, found: Found) -> None:
        now = self._node.clock.monotonic_s()
        running = not found.frozen  # the kernel's word goes before the journal's
        status = status.model_copy(update={"state": State.READY if running else State.PAUSED})
        lived_s = status.lived_s + (now - status.since_mono if running else 0.0)
        clocks = Clocks(status.lifetime, now, lived_s=lived_s)
        if not running:
            clocks.pause(now, already_s=now - status.since_mono)
        holding = Holding(self._node, self._node.host.paths.sandbox(origin.sandbox_id))
        holding.adopt(found.process, found.cgroup, found.link)
        self._table.add(
            Sandbox(origin, status, holding, clocks, journaled=True, oom_kills_told=found.oom_kills)
        )

    async def _bury(self, origin: Origin, status: Status) -> None:
        """It died while nobody looked. The sweep that follows removes what is left of it."""
        reason, detail = await self._node.run(self._judge, origin, status)
        self._table.bury(
            Dead(
                sandbox_id=origin.sandbox_id,
                project=origin.project,
                request_id=origin.request_id,
                reason=reason,
                at=self._node.clock.wall_s(),
                detail=detail or "ended while its edge was away",
            )
        )
        await self._node.layers.release(origin.sandbox_id)
        _log.info("buried", sandbox=origin.sandbox_id, reason=reason.value)

    def _judge(self, origin: Origin, status: Status) -> tuple[DeathReason, str]:
        process = status.process
        same_boot = process is not None and process.boot_id == self._node.boot_id
        try:
            stats = self._node.host.cgroups.open(origin.sandbox_id).stats()
            oom_kills = stats.memory.oom_kills
        except OSError:
            oom_kills = 0
        return judge(Evidence(status.ending, ExitStatus(None, None), oom_kills, 0, same_boot))

    async def _greet(self, sandbox: Sandbox) -> None:
        """Connect, and keep the idle clock for the commands that still run."""
        try:
            channel = await sandbox.holding.agent.channel()
        except DSecError as err:
            _log.warning("agent does not answer", sandbox=sandbox.id, error=str(err))
            return
        for process in channel.hello.processes:
            if process.state is ProcessState.RUNNING:
                self._execs.watch(sandbox, sandbox.commands.note(process.exec_id))


async def leave_all(table: Table) -> None:
    """At the end of this process: let go, for the successor."""
    for sandbox in table:
        await sandbox.holding.leave()
