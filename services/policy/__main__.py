"""Composition of a node's policy service."""

from __future__ import annotations

import contextlib
from pathlib import Path

from libdsec.errors import Conflict, Unavailable
from libdsec.wire import subjects
from libdsec.wire.policy import PolicyHealth
from libhost.address import own_addresses
from libhost.aio import HostThreads
from libhost.bpf.table import PolicyTable
from libhost.cgroup import CgroupLayout, NodeCgroups
from libhost.errors import BusyError, UnsupportedError
from libhost.paths import NodePaths

from ..chassis.run import run
from ..chassis.service import Service
from .aliases import AliasFile
from .enforcement import Enforcement
from .handlers import Verbs
from .metrics import PolicyMetrics
from .settings import PolicySettings

_OPEN_TIMEOUT_S = 30.0


def open_table(settings: PolicySettings) -> PolicyTable:
    """Take over what is in force on this node; the cgroup it hangs on is made if need be."""
    paths = NodePaths(settings.node, settings.state_dir, settings.run_dir)
    layout = CgroupLayout.detect(Path("/proc/self/mountinfo").read_text())
    cgroups = NodeCgroups(layout, paths)
    cgroups.ensure()
    return PolicyTable.open(paths, cgroups.v2_path, object_path=settings.bpf_object)


async def setup(service: Service[PolicySettings]) -> None:
    settings, metrics = service.settings, PolicyMetrics(service.metrics.registry)
    aliases = AliasFile(settings.alias_file)
    enforcement, reason = None, ""
    opening = HostThreads(1)
    try:
        table = await opening.run(_OPEN_TIMEOUT_S, open_table, settings)
        service.stack.callback(table.close)
        enforcement = Enforcement(
            settings.node,
            table,
            aliases,
            node_addresses=own_addresses,
            monotonic=service.clock.monotonic_s,
        )
        metrics.watch("sandboxes", "sandboxes with a policy in force", enforcement.count)
        metrics.watch("stray_denied", "refusals to what belongs to no sandbox",
                      enforcement.stray_denied)  # fmt: skip
    except BusyError as err:
        raise Conflict(str(err)) from err
    except (UnsupportedError, OSError) as err:
        reason = str(err)
        service.log.error("no policy can be enforced here", reason=reason)
    finally:
        opening.close()
    verbs = Verbs(enforcement, reason, metrics, service.clock)
    service.stack.callback(verbs.close)
    await serve(service, verbs)
    service.ready_when("enforcing", lambda: enforcement is not None)
    service.spawn(report_health(service, enforcement, reason, aliases), name="health")


async def serve(service: Service[PolicySettings], verbs: Verbs) -> None:
    node = service.settings.node
    await service.bus.serve(subjects.POLICY_APPLY, verbs.apply, node=node)
    await service.bus.serve(subjects.POLICY_CHECK, verbs.check, node=node)
    await service.bus.serve(subjects.POLICY_REMOVE, verbs.remove, node=node)
    await service.bus.serve(subjects.POLICY_AUDIT, verbs.audit, node=node)
    await service.bus.serve(subjects.POLICY_RECONCILE, verbs.reconcile, node=node)


async def report_health(
    service: Service[PolicySettings],
    enforcement: Enforcement | None,
    reason: str,
    aliases: AliasFile,
) -> None:
    """A broken alias file is told while the service is ready: what needs no alias still works."""
    said = ""
    while True:
        aliases.current()
        if aliases.problem != said:
            said = aliases.problem
            service.log.warning("alias file", path=str(aliases.path), problem=said or "none")
        told = reason or (f"alias file {aliases.path}: {said}" if said else "")
        mechanisms = enforcement.mechanisms if enforcement else ()
        health = PolicyHealth(ready=enforcement is not None, reason=told, mechanisms=mechanisms)
        with contextlib.suppress(Unavailable):  # the bus comes back, and so does the next report
            await service.bus.publish(subjects.POLICY_HEALTH, health, node=service.settings.node)
        await service.clock.sleep(service.settings.health_interval_s)


if __name__ == "__main__":
    run("policy", PolicySettings, setup)
