"""Composition of a node's policy service."""

from __future__ import annotations

import contextlib
from pathlib import Path

from libdsec.errors import Conflict, Unavailable
from libdsec.wire import subjects
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
    metrics = PolicyMetrics(service.metrics.registry)
    aliases = AliasFile(service.settings.alias_file)
    enforcement, reason = await enforce(service, aliases)
    if enforcement is not None:
        metrics.watch("sandboxes", "with a policy in force", enforcement.count)
        metrics.watch("stray_denied", "refusals to what is no sandbox", enforcement.stray_denied)
        service.debug("strays", enforcement.strays)
    verbs = Verbs(enforcement, reason, metrics, service.clock)
    service.stack.callback(verbs.close)
    await serve(service, verbs)
    service.ready_when("enforcing", lambda: enforcement is not None)
    service.spawn(report_health(service, verbs, aliases), name="health")


async def enforce(
    service: Service[PolicySettings], aliases: AliasFile
) -> tuple[Enforcement | None, str]:
    """Where the host cannot enforce, the service runs all the same, to say why to who asks.

    Raises Conflict if another process polices this node.
    """
    opening = HostThreads(1)
    try:
        table = await opening.run(_OPEN_TIMEOUT_S, open_table, service.settings)
    except BusyError as err:
        raise Conflict(str(err)) from err
    except (UnsupportedError, OSError) as err:
        service.log.error("no policy can be enforced here", reason=str(err))
        if isinstance(err, OSError):
            service.spawn(give_up_later(service, str(err)), name="give up")
        return None, str(err)
    finally:
        opening.close()
    service.stack.callback(table.close)
    enforcement = Enforcement(
        service.settings.node,
        table,
        aliases,
        node_addresses=own_addresses,
        monotonic=service.clock.monotonic_s,
    )
    return enforcement, ""


async def give_up_later(service: Service[PolicySettings], reason: str) -> None:
    """What the kernel refused this time it may grant the next: after a while in which everybody is
    told why, this process ends, and the one that is started in its place tries again."""
    await service.clock.sleep(service.settings.retry_open_s)
    raise Unavailable(f"no policy can be enforced here: {reason}")


async def serve(service: Service[PolicySettings], verbs: Verbs) -> None:
    node = service.settings.node
    await service.bus.serve(subjects.POLICY_APPLY, verbs.apply, node=node)
    await service.bus.serve(subjects.POLICY_CHECK, verbs.check, node=node)
    await service.bus.serve(subjects.POLICY_REMOVE, verbs.remove, node=node)
    await service.bus.serve(subjects.POLICY_AUDIT, verbs.audit, node=node)
    await service.bus.serve(subjects.POLICY_RECONCILE, verbs.reconcile, node=node)


async def report_health(service: Service[PolicySettings], verbs: Verbs, aliases: AliasFile) -> None:
    """A broken alias file is told while the service is ready: what needs no alias still works."""
    told = ""
    while True:
        health = await verbs.health(aliases)
        if health.reason != told:
            told = health.reason
            service.log.warning("health", ready=health.ready, reason=told or "all is well")
        with contextlib.suppress(Unavailable):  # the bus comes back, and so does the next report
            await service.bus.publish(subjects.POLICY_HEALTH, health, node=service.settings.node)
        await service.clock.sleep(service.settings.health_interval_s)


if __name__ == "__main__":
    run("policy", PolicySettings, setup)
