"""Changing the policy of a sandbox that lives, and reading what its policy has denied.

Every change is a whole policy under a new generation, put in force by the policy service in one
step. The edge journals it only after that, so what the journal says is never ahead of the kernel;
an edge that died in between finds the kernel one generation ahead and applies the next one.
"""

from __future__ import annotations

import asyncio

from libdsec.errors import Conflict, InvalidArgument, Unsupported
from libdsec.wire.policy import ApplyPolicy, PolicyInForce
from libdsec.wire.sandbox import AuditLog, NetworkNone, NetworkSpec, PolicyApplied, PolicySpec

from .node import Node
from .pause import write_hosts
from .sandbox import Sandbox
from .tasks import Tasks


class Policing:
    """set_network, set_phase, audit."""

    def __init__(self, node: Node, tasks: Tasks) -> None:
        self._node = node
        self._tasks = tasks

    async def set_network(self, sandbox: Sandbox, network: NetworkSpec) -> PolicyApplied:
        """Replaces the whole rule set; the protected paths stay as they are."""
        protected = sandbox.status.policy.protected_paths
        policy = PolicySpec(network=network, protected_paths=protected)
        return await self._change(sandbox, policy, sandbox.status.phase)

    async def set_phase(self, sandbox: Sandbox, name: str) -> PolicyApplied:
        phases = sandbox.origin.spec.phases
        if name not in phases:
            known = ", ".join(sorted(phases)) or "none"
            raise InvalidArgument(
                f"sandbox {sandbox.id} has no phase {name!r}",
                hint=f"phases are given at create; this one has: {known}",
            )
        return await self._change(sandbox, phases[name], name)

    async def audit(self, sandbox: Sandbox) -> AuditLog:
        found = await self._node.policy.audit(sandbox.id)
        return AuditLog(denials=found.denials, dropped=found.dropped)

    async def put_back(self, sandbox: Sandbox) -> None:
        """The policy service has lost it: the kernel denies everything until it is in force again.

        Raises:
            DSecError: it could not be; nothing is allowed meanwhile.
        """
        async with sandbox.transition:
            if sandbox.usable and sandbox.status.generation > 0:
                status = sandbox.status
                await self._node.policy.apply(
                    self._request(sandbox, status.policy, status.generation)
                )

    async def _change(
        self, sandbox: Sandbox, policy: PolicySpec, phase: str | None
    ) -> PolicyApplied:
        """Carried through once it is begun, whatever becomes of the caller."""
        work = self._apply(sandbox, policy, phase)
        return await asyncio.shield(self._tasks.spawn(work, name=f"policy {sandbox.id}"))

    async def _apply(
        self, sandbox: Sandbox, policy: PolicySpec, phase: str | None
    ) -> PolicyApplied:
        async with sandbox.transition:
            if sandbox.holding.link is None and not isinstance(policy.network, NetworkNone):
                raise Unsupported(
                    f"sandbox {sandbox.id} was created without a network",
                    hint="give it one at create, in its policy or in one of its phases",
                )
            in_force = await self._put_in_force(
                self._request(sandbox, policy, sandbox.status.generation + 1)
            )
            new_names = in_force.hosts != sandbox.status.hosts
            sandbox.update(
                self._node.records,
                policy=policy,
                phase=phase,
                generation=in_force.generation,
                policy_env=in_force.env,
                hosts=in_force.hosts,
                hosts_written=sandbox.status.hosts_written and not new_names,
            )
            if new_names and not sandbox.paused:
                await write_hosts(sandbox)
                sandbox.update(self._node.records, hosts_written=True)
            return PolicyApplied(generation=in_force.generation)

    def _request(self, sandbox: Sandbox, policy: PolicySpec, generation: int) -> ApplyPolicy:
        holding = sandbox.holding
        if holding.cgroup is None or holding.process is None:
            raise InvalidArgument(f"sandbox {sandbox.id} does not run")
        return ApplyPolicy(
            sandbox_id=sandbox.id,
            generation=generation,
            policy=policy,
            cgroup_id=holding.cgroup.v2_path.stat().st_ino,
            ifindex=holding.link.ifindex if holding.link is not None else None,
            address=str(holding.link.address) if holding.link is not None else None,
            netns_path=f"/proc/{holding.process.pid}/ns/net",
        )

    async def _put_in_force(self, request: ApplyPolicy) -> PolicyInForce:
        try:
            return await self._node.policy.apply(request)
        except Conflict:
            # A predecessor died between the kernel's change and the journal's: one ahead of it.
            ahead = request.model_copy(update={"generation": request.generation + 1})
            return await self._node.policy.apply(ahead)
