"""create, ps, stop, pause, resume."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from ..client import DSecClient
from ..errors import DSecError
from ..policy import Network, Policy
from ..sandbox import Sandbox
from ..selection import Many
from ..wire import defaults as d
from ..wire.sandbox import NetworkSpec, SandboxInfo
from . import output
from .output import Json
from .session import Exit, exit_code, pairs, run, usage

Labels = Annotated[list[str] | None, typer.Option("--label", "-l", help="NAME=VALUE; repeatable.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="SANDBOX...")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say which.")]
Limit = Annotated[int | None, typer.Option(help="At most this many, the oldest first.")]

_TO_MANY = {
    "stop": DSecClient.stop_many,
    "pause": DSecClient.pause_many,
    "resume": DSecClient.resume_many,
}


def register(app: typer.Typer) -> None:
    app.command()(create)
    app.command()(ps)
    app.command()(stop)
    app.command()(pause)
    app.command()(resume)


def create(
    ctx: typer.Context,
    image: Annotated[str, typer.Argument(help="Base layer, name or name@version.")],
    count: Annotated[int, typer.Option("--count", "-n", help="How many alike ones.")] = 1,
    backend: Annotated[str, typer.Option(help="container, microvm or vm.")] = "container",
    workspace: Annotated[str | None, typer.Option(help="Workspace layer.")] = None,
    toolkit: Annotated[list[str] | None, typer.Option(help="Toolkit layer; repeatable.")] = None,
    cpus: float = d.CPUS,
    memory_mib: int = d.MEMORY_MIB,
    disk_mib: int = d.DISK_MIB,
    max_files: int = d.MAX_FILES,
    shm_mib: Annotated[
        int | None, typer.Option(help=f"Default: {d.SHM_MIB}, at most the memory.")
    ] = None,
    pids: int = d.PIDS,
    qos: Annotated[str, typer.Option(help="best-effort or latency-sensitive.")] = "best-effort",
    network: Annotated[str, typer.Option(help="none or public; see --service, --rule.")] = "none",
    service: Annotated[
        list[str] | None, typer.Option(help="Allow a service alias; repeatable.")
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="Allow tcp:10.0.0.5:443; repeatable.")
    ] = None,
    protect: Annotated[list[str] | None, typer.Option(help="Protected path; repeatable.")] = None,
    user: str | None = None,
    workdir: str | None = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE; repeatable.")
    ] = None,
    label: Labels = None,
    idle_timeout_s: float = d.IDLE_TIMEOUT_S,
    max_lifetime_s: float = d.MAX_LIFETIME_S,
    max_paused_s: float = d.MAX_PAUSED_S,
    timeout: Annotated[float, typer.Option(help="Seconds, queueing included.")] = 120.0,
    key: Annotated[str | None, typer.Option(help="Idempotency key.")] = None,
    as_json: Json = False,
) -> None:
    """Make sandboxes; prints their ids."""
    labels, variables = pairs("--label", label), pairs("--env", env)
    chosen = _network(network, service or [], rule or [])

    async def body(client: DSecClient) -> Exit | None:
        with output.waiting("waiting for a place", quiet=as_json) as tell:
            made = await client.create_many(
                count, image=image, backend=backend, workspace=workspace, toolkits=toolkit or (),
                cpus=cpus, memory_mib=memory_mib, disk_mib=disk_mib, max_files=max_files,
                shm_mib=min(d.SHM_MIB, memory_mib) if shm_mib is None else shm_mib,
                pids=pids, qos=qos,
                policy=Policy(network=chosen, protected_paths=tuple(protect or ())),
                user=user, workdir=workdir, env=variables, labels=labels,
                idle_timeout_s=idle_timeout_s, max_lifetime_s=max_lifetime_s,
                max_paused_s=max_paused_s, timeout=timeout, idempotency_key=key,
                on_progress=output.progress_teller(tell),
            )  # fmt: skip
        return _show_made(made, as_json=as_json)

    run(ctx, body, as_json=as_json)


def ps(
    ctx: typer.Context,
    label: Labels = None,
    every_project: Annotated[
        bool, typer.Option("--all", "-a", help="Of every project; for operators.")
    ] = False,
    limit: int = 10_000,
    as_json: Json = False,
) -> None:
    """List sandboxes, and the nodes that did not answer."""
    labels = pairs("--label", label)

    async def body(client: DSecClient) -> None:
        listing = client.list(labels=labels, limit=limit, every_project=every_project)
        found = [info async for info in listing]
        if as_json:
            for info in found:
                output.document(info)
        else:
            output.table(
                ("SANDBOX", "NODE", "STATE", "IMAGE", "AGE", "LABELS"), map(_row, found)
            )  # fmt: skip
        output.coverage(listing.coverage)

    run(ctx, body, as_json=as_json)


def stop(
    ctx: typer.Context, sandboxes: Ids = None, label: Labels = None,
    dry_run: DryRun = False, limit: Limit = None, as_json: Json = False,
) -> None:  # fmt: skip
    """End sandboxes, by id or by label."""
    _each_or_many(ctx, "stop", Sandbox.stop, sandboxes, label, dry_run, limit, as_json)


def pause(
    ctx: typer.Context, sandboxes: Ids = None, label: Labels = None,
    dry_run: DryRun = False, limit: Limit = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Freeze sandboxes and give their memory back."""
    _each_or_many(ctx, "pause", Sandbox.pause, sandboxes, label, dry_run, limit, as_json)


def resume(
    ctx: typer.Context, sandboxes: Ids = None, label: Labels = None,
    dry_run: DryRun = False, limit: Limit = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Let paused sandboxes run again."""
    _each_or_many(ctx, "resume", Sandbox.resume, sandboxes, label, dry_run, limit, as_json)


def _each_or_many(
    ctx: typer.Context,
    verb: str,
    to_one: Callable[[Sandbox], Awaitable[object]],
    sandboxes: list[str] | None,
    label: list[str] | None,
    dry_run: bool,
    limit: int | None,
    as_json: bool,
) -> None:
    labels = pairs("--label", label)
    if bool(sandboxes) == bool(labels):
        usage("name sandboxes, or select them by --label, one of the two")

    async def each(client: DSecClient) -> Exit | None:
        worst = Exit.DONE
        for sandbox_id in sandboxes or []:
            try:
                sandbox = await client.connect(sandbox_id)
                if not dry_run:
                    await to_one(sandbox)
            except DSecError as err:
                output.complain(err, as_json=as_json)
                worst = max(worst, exit_code(err))
            else:
                _show_done(sandbox_id, as_json=as_json)
        return worst

    async def many(client: DSecClient) -> Exit | None:
        done: Many = await _TO_MANY[verb](client, labels=labels, dry_run=dry_run, limit=limit)
        for sandbox_id in done.done:
            _show_done(sandbox_id, as_json=as_json)
        for sandbox_id, why in sorted(done.failed.items()):
            output.say(f"dsec: {sandbox_id}: {why}")
        output.coverage(done.coverage, dropped="are left as they are")
        return Exit.REFUSED if done.failed or done.coverage.failed else None

    run(ctx, each if sandboxes else many, as_json=as_json)


def _show_done(sandbox_id: str, *, as_json: bool) -> None:
    if as_json:
        output.document({"sandbox_id": sandbox_id})
    else:
        print(sandbox_id)


def _show_made(made: list[Sandbox | DSecError], *, as_json: bool) -> Exit:
    worst = Exit.DONE
    told: dict[int, int] = {}  # one error may stand in many places
    for item in made:
        if isinstance(item, DSecError):
            worst = max(worst, exit_code(item))
            told[id(item)] = told.get(id(item), 0) + 1
            if told[id(item)] == 1 or as_json:
                output.complain(item, as_json=as_json)
        elif as_json:
            output.document(
                {
                    "sandbox_id": item.id, "node": item.node, "request_id": item.request_id,
                    "phases_ms": item.phases_ms,
                }
            )  # fmt: skip
        else:
            print(item.id)
    if (failed := sum(told.values())) > 1 and not as_json:
        output.say(f"dsec: {failed} of {len(made)} were not made")
    return worst


def _network(mode: str, services: list[str], rules: list[str]) -> NetworkSpec:
    if services or rules:
        if mode == "public":
            usage("--network public already allows everything --service and --rule name")
        return Network.allow(services=services, rules=rules)
    if mode == "public":
        return Network.public()
    if mode != "none":
        usage(f"--network {mode!r} is neither none nor public")
    return Network.none()


def _row(info: SandboxInfo) -> tuple[object, ...]:
    state = f"{info.state.value} ({info.death})" if info.death else info.state.value
    labels = " ".join(f"{name}={value}" for name, value in sorted(info.labels.items()))
    born = output.age(time.time() - info.created_at)
    return info.sandbox_id, info.node, state, info.image, born, labels
