"""Starting a sandbox: a plan made of values, then the steps that carry it out.

Layers are stacked beside its confinement (cgroup, network), then disk, root and runtime are made
ready beside the policy. The runtime waits for its configuration, and gets it only after the policy
service's word that the policy is in force: until then there is no process that is the sandbox's.
What is short is done in one thread after the other's end: two that call the kernel in turn hand
the interpreter to each other at every call.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libdsec.errors import (
    DSecError,
    Internal,
    NoCapacity,
    Unavailable,
    Unsupported,
)
from libdsec.wire.layer import ResolvedLayers
from libdsec.wire.policy import ApplyPolicy, PolicyInForce
from libdsec.wire.sandbox import NetworkNone, PolicySpec, Qos, SandboxSpec
from libhost.cgroup import CgroupLimits, SchedClass
from libhost.command import CommandFailedError
from libhost.crun import ContainerSpec, bind_agent_socket
from libhost.disk import DiskLimits
from libhost.errors import HostError, UnsupportedError
from libhost.layer import MountedLayer
from libhost.overlay import apply, plan_overlay
from libhost.paths import SandboxPaths

from .fault import Point
from .holding import Holding
from .layers.mounts import LayerStack
from .node import Node, begun, together
from .timing import Phases, record_span

_WEIGHT_PER_CPU = 100
_CGROUP_WEIGHT_RANGE = (1, 10_000)
_EXHAUSTED = {
    errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EADDRNOTAVAIL
}  # fmt: skip


@dataclass(frozen=True)
class StartPlan:
    """All that is decided before anything is touched."""

    sandbox: SandboxPaths
    hostname: str
    sched: SchedClass
    limits: CgroupLimits
    disk: DiskLimits
    container: ContainerSpec
    policy: PolicySpec
    later_policies: tuple[PolicySpec, ...]  # of the other phases: refused now, not when it is time
    needs_link: bool
    nameservers: tuple[str, ...]


@dataclass(frozen=True)
class Started:
    """What is known once the agent has answered."""

    in_force: PolicyInForce


def plan_start(
    sandbox: SandboxPaths, spec: SandboxSpec, *, nameservers: tuple[str, ...] = ()
) -> StartPlan:
    """Pure: the caller's specification as the host's own values."""
    resources = spec.resources
    least, most = _CGROUP_WEIGHT_RANGE
    hostname = sandbox.sandbox_id.rpartition("_")[2]
    policy = active_policy(spec)
    return StartPlan(
        sandbox=sandbox,
        hostname=hostname,
        sched=SchedClass.LS if spec.qos is Qos.LATENCY_SENSITIVE else SchedClass.BE,
        limits=CgroupLimits(
            memory_mib=resources.memory_mib,
            pids=resources.pids,
            cpus=resources.cpus,
            cpu_weight=min(most, max(least, round(resources.cpus * _WEIGHT_PER_CPU))),
        ),
        disk=DiskLimits(size_mib=resources.disk_mib, max_files=resources.max_files),
        container=ContainerSpec(hostname=hostname, shm_mib=resources.shm_mib),
        policy=policy,
        later_policies=tuple(p for name, p in spec.phases.items() if name != spec.phase),
        needs_link=not isinstance(policy.network, NetworkNone) or _may_get_network(spec),
        nameservers=nameservers,
    )


def active_policy(spec: SandboxSpec) -> PolicySpec:
    """The policy that applies at create: the named phase's, or the only one there is."""
    return spec.phases[spec.phase] if spec.phase is not None else spec.policy


def _may_get_network(spec: SandboxSpec) -> bool:
    """A link cannot be added to a running sandbox, so one that a later phase needs is there from
    the start, closed by its policy."""
    return any(not isinstance(p.network, NetworkNone) for p in spec.phases.values())


async def start(
    node: Node, holding: Holding, plan: StartPlan, resolved: ResolvedLayers, phases: Phases
) -> Started:
    """Acquire everything, downwards; on any failure nothing is left and a DSecError is raised."""
    run = _Run(node, holding, plan, resolved, phases)
    try:
        async with holding.protected():
            await together(run.stack(), run.confine())
            await together(run.launch(), run.enforce())
            return await run.start()
    except (OSError, HostError) as err:
        raise _translated(err, plan) from err


class _Run:
    """One start on its way: what one step leaves for the next."""

    def __init__(
        self,
        node: Node,
        holding: Holding,
        plan: StartPlan,
        resolved: ResolvedLayers,
        phases: Phases,
    ) -> None:
        self._node = node
        self._holding = holding
        self._plan = plan
        self._resolved = resolved
        self._phases = phases
        self._layers: LayerStack | None = None
        self._in_force: PolicyInForce | None = None

    async def stack(self) -> None:
        with self._phases.phase("layers"):
            self._layers = await self._node.layers.acquire(
                self._plan.sandbox.sandbox_id, self._resolved
            )

    async def confine(self) -> None:
        with self._phases.phase("network"):
            await self._node.run(self._make_confinement)

    async def launch(self) -> None:
        """Bring the runtime to where it waits for its configuration."""
        if self._layers is None:
            raise Internal("a sandbox without layers must not start")
        with self._phases.phase("launch"):
            await self._node.run(self._launch, self._layers.lowers)

    async def enforce(self) -> None:
        with self._phases.phase("policy"):
            await self._apply_policy()

    async def start(self) -> Started:
        if self._in_force is None:
            raise Internal("a sandbox without a policy must not start")
        began_ns = time.monotonic_ns()
        async with begun(self._holding.agent.channel()) as greeting:
            with self._phases.phase("start"):
                await self._node.run(self._start_process, self._in_force.hosts)
                self._holding.watch_exit()
                self._node.fault(Point.DURING_START)
            with self._phases.phase("ready"):
                channel = await greeting
        record_span("agent", began_ns, channel.hello.now_ns)  # to its greeting, by its own clock
        return Started(self._in_force)

    def _make_confinement(self) -> None:
        host, plan = self._node.host, self._plan
        if plan.needs_link:
            if host.network is None:
                raise UnsupportedError("network", "this node has no range of addresses configured")
            self._holding.link = host.network.take(plan.sandbox)
        self._holding.cgroup = host.cgroups.create(plan.sandbox.sandbox_id, plan.sched, plan.limits)

    async def _apply_policy(self) -> None:
        cgroup, link = self._holding.cgroup, self._holding.link
        if cgroup is None:
            raise Internal("a policy needs its cgroup")
        for later in self._plan.later_policies:
            await self._node.policy.check(later)
        self._holding.policed = True  # from here on it may be in force, whatever the answer is
        self._in_force = await self._node.policy.apply(
            ApplyPolicy(
                sandbox_id=self._plan.sandbox.sandbox_id,
                generation=1,
                policy=self._plan.policy,
                cgroup_id=cgroup.v2_path.stat().st_ino,
                ifindex=link.ifindex if link is not None else None,
                address=str(link.address) if link is not None else None,
            )
        )

    def _launch(self, lowers: Sequence[MountedLayer]) -> None:
        holding, host, sandbox = self._holding, self._node.host, self._plan.sandbox
        if holding.cgroup is None:
            raise Internal("a start needs its cgroup")
        bench = holding.workbench
        with bench.at_work():
            bench.writable = disk = host.disk.create(sandbox, self._plan.disk)
            bench.listen_fd = bind_agent_socket(sandbox)
            write_etc(disk.upper.fd, self._plan)
            bench.root_fd = apply(plan_overlay(lowers, disk.upper, disk.work, self._node.overlay))
            holding.launch = host.runtime.launch(
                sandbox,
                root_fd=bench.root_fd,
                listen_fd=bench.listen_fd,
                cgroup=holding.cgroup,
                link=holding.link,
            )

    def _start_process(self, hosts: Mapping[str, str]) -> None:
        """The workbench is closed here, in a thread, because the kernel has work to do at it."""
        holding, host = self._holding, self._node.host
        with holding.workbench.at_work():
            if hosts:
                write_hosts(holding.workbench.root_fd, self._plan, hosts)
            if holding.link is not None and host.network is not None:
                host.network.open_gate(holding.link)
            launch, holding.launch = holding.launch, None
            if launch is None:
                raise Internal("a start needs its runtime")
            holding.process = host.runtime.start(
                launch, self._plan.container, timeout_s=self._node.options.step_timeout_s / 2
            )
            if holding.link is not None:
                holding.link.close_namespace()
            holding.workbench.close()


def write_etc(upper_fd: int, plan: StartPlan) -> None:
    """The three files that say who and where a machine is, put on top of the image's own.

    The writable layer is new and empty, so nothing in it can be a trap for the one who writes.
    """
    os.mkdir("etc", 0o755, dir_fd=upper_fd)
    etc_fd = os.open("etc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=upper_fd)
    try:
        for name, text in (
            ("hostname", f"{plan.hostname}\n"),
            ("hosts", hosts_text(plan.hostname, {})),
            ("resolv.conf", "".join(f"nameserver {server}\n" for server in plan.nameservers)),
        ):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(name, flags, 0o644, dir_fd=etc_fd)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
    finally:
        os.close(etc_fd)


def write_hosts(root_fd: int, plan: StartPlan, hosts: Mapping[str, str]) -> None:
    """Name what the policy's aliases stand for, in the root that nobody runs in yet. What is
    written to is :func:`write_etc`'s own file, whatever the image has by that name."""
    flags = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open("etc/hosts", flags, dir_fd=root_fd), "w") as file:
        file.write(hosts_text(plan.hostname, hosts))


def hosts_text(hostname: str, hosts: Mapping[str, str]) -> str:
    """/etc/hosts: the sandbox itself, and the names the policy's aliases stand for."""
    lines = ["127.0.0.1 localhost", "::1 localhost", f"127.0.0.1 {hostname}"]
    lines += [f"{address} {name}" for name, address in sorted(hosts.items())]
    return "\n".join(lines) + "\n"


def _translated(err: Exception, plan: StartPlan) -> DSecError:
    """What the host said, as an error that the caller and the scheduler can act on."""
    if isinstance(err, UnsupportedError):
        return Unsupported(str(err))
    if isinstance(err, TimeoutError):
        return Unavailable(f"the host took too long to start {plan.sandbox.sandbox_id}")
    if isinstance(err, CommandFailedError):
        said = err.completed.stderr.decode(errors="replace").strip()[-400:]
        return Unavailable(f"the container runtime refused: {said}")
    if isinstance(err, OSError) and err.errno in _EXHAUSTED:
        return NoCapacity(f"the host is out of something: {err}", retry_after_s=5.0)
    return Unavailable(f"the host could not start {plan.sandbox.sandbox_id}: {err}")
