"""DSecClient: one entry to every backend.

The surface is docs-stable: other people's programs call these names. What is not built yet exists
and raises `Unsupported`. A client belongs to one event loop; `libdsec.sync` may be shared freely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from .args import DSecContainerRunArgs
from .bus import Budget
from .callback import Callback
from .connection import Connection
from .context import Context
from .errors import DSecError, InvalidArgument, SandboxDead, Unsupported
from .exec_result import ExecResult
from .layers import Layers
from .operation import Operation
from .operations import Operations
from .placing import Placing
from .sandbox import Sandbox
from .selection import (
    PAUSE_VERB,
    RESUME_VERB,
    STOP_VERB,
    Many,
    SandboxListing,
    do_many,
    list_nodes,
)
from .settings import resolve
from .spec import SpecArguments, build_spec, check_key, check_labels, check_seconds
from .wire.deadletter import LaneDepth, QueueQuery
from .wire.defaults import CREATE_MANY_MESSAGE, CREATE_TIMEOUT_S, SUSPECT_AFTER_S
from .wire.ids import sandbox_node
from .wire.model import random_token
from .wire.node import NodeView
from .wire.placement import Progress, ReadyItem
from .wire.sandbox import ById, SandboxSpec, Selection, State
from .wire.subjects import INFO, QUEUE

# Named here because inside the class `list` is the method.
Made = list[Sandbox | DSecError]
Nodes = list[NodeView]
Lanes = list[LaneDepth]

_MAX_COUNT = 100_000
_LIST_LIMIT = 10_000
_SCATTER_S = 5.0
_MANY_S = 60.0


class DSecClient:
    """A connection to DSec, opened by `open`, by `async with`, or by its first use.

    Args:
        servers: addresses of the NATS servers; a string may hold several, separated by commas.
        project: whose sandboxes these are; the credentials must be for it.
        credentials: a file with user and password, or a NATS `.creds` file.
        user, password: instead of a file.
        ca: the certificate authority of tls:// servers.
        context: the context file.

    Attributes:
        layers: publish, list, info, remove, see `libdsec.layers.Layers`.
        operations: what operators do, see `libdsec.operations.Operations`.

    What is not given is taken from DSEC_* variables, then from the context file that `dsec up`
    writes (see `libdsec.settings`). No root is needed.

    Raises:
        InvalidArgument: a file or variable is wrong.
    """

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        project: str | None = None,
        credentials: str | Path | None = None,
        user: str | None = None,
        password: str | None = None,
        ca: str | Path | None = None,
        context: str | Path | None = None,
    ) -> None:
        listed = servers.split(",") if isinstance(servers, str) else servers
        said = Context(
            servers=tuple(listed) if listed else None,
            project=project,
            user=user,
            password=password,
            credentials=Path(credentials) if credentials else None,
            ca=Path(ca) if ca else None,
        )
        self._settings = resolve(said, context=Path(context) if context else None)
        self._connection = Connection(self._settings)
        self.layers = Layers(self._connection)
        self.operations = Operations(self._connection)

    @property
    def project(self) -> str:
        return self._settings.project

    async def open(self) -> None:
        """Connect. Idempotent.

        Raises:
            Unavailable: no server answers, or none is configured.
            PermissionDenied: the credentials were refused.
        """
        await self._connection.bus()

    async def close(self) -> None:
        """Disconnect. Sandboxes live on. Idempotent."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # --- making sandboxes -------------------------------------------------------------------------

    async def create(
        self,
        *,
        timeout: float = CREATE_TIMEOUT_S,
        on_progress: Callback[Progress] | None = None,
        idempotency_key: str | None = None,
        **spec: Unpack[SpecArguments],
    ) -> Sandbox:
        """Ask for a sandbox and wait until it is ready.

        Args:
            timeout: for the whole call, queueing included.
            on_progress: told why the request waits.
            idempotency_key: the same key with the same arguments gives the same sandbox, for 24 h.
            spec: see `libdsec.spec.SpecArguments`; only `image` is required.

        Raises:
            InvalidArgument, NotFound, Unsupported: it can never be made as asked for.
            NoCapacity, QuotaExceeded, DeadlineExceeded, Unavailable: it could not be made in time.
            Conflict: the key was used with other arguments.
        """
        [made] = await self._create(1, spec, timeout, on_progress, idempotency_key)
        if isinstance(made, DSecError):
            raise made
        return made

    async def create_many(
        self,
        count: int,
        *,
        timeout: float = CREATE_TIMEOUT_S,
        on_progress: Callback[Progress] | None = None,
        idempotency_key: str | None = None,
        **spec: Unpack[SpecArguments],
    ) -> Made:
        """`count` alike sandboxes; one that could not be made is its exception, in its place.

        Raises:
            InvalidArgument: the arguments are wrong for all of them.
        """
        return await self._create(count, spec, timeout, on_progress, idempotency_key)

    async def run_container(
        self,
        args: DSecContainerRunArgs,
        timeout: float = CREATE_TIMEOUT_S,
        *,
        on_progress: Callback[Progress] | None = None,
    ) -> Sandbox:
        """`create` of a container, from the few arguments of `DSecContainerRunArgs`."""
        return await self.create(
            timeout=timeout,
            on_progress=on_progress,
            backend="container",
            image=args.container_image,
            memory_mib=args.memory_limit_mb,
            cpus=args.cpu_cores_limit,
            idle_timeout_s=args.ttl_running_stop,
            policy=args.policy(),
            user=args.init_user,
        )

    async def connect(self, sandbox_id: str) -> Sandbox:
        """A handle of a sandbox that exists.

        Raises:
            NotFound: the node knows no such sandbox of this project.
            SandboxDead: it has ended, and why.
        """
        with self._connection.operation("connect") as op:
            node = op.node = sandbox_node(sandbox_id)
            info = await self._connection.call(
                INFO, ById(sandbox_id=sandbox_id), op=op, node=node,
                patience_s=SUSPECT_AFTER_S, idempotent=True,
            )  # fmt: skip
            if info.state is State.DEAD:
                raise SandboxDead.for_reason(sandbox_id, info.death)
        return Sandbox(
            self._connection, info.sandbox_id, backend=info.backend, labels=info.labels,
            request_id=info.request_id, phases_ms=info.phases_ms,
        )  # fmt: skip

    # --- many at once -----------------------------------------------------------------------------

    def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        limit: int = _LIST_LIMIT,
        every_project: bool = False,
        timeout: float = _SCATTER_S,
    ) -> SandboxListing:
        """The project's sandboxes that carry all of these labels, oldest first.

        Args:
            every_project: for operators.

        Returns:
            An async iterator of SandboxInfo whose `coverage` names the nodes that did not answer.
        """
        with self._connection.operation("list"):
            selection = Selection(labels=check_labels(labels or {}), limit=limit)
        return SandboxListing(self._connection, selection, timeout, every_project=every_project)

    async def pause_many(
        self,
        *,
        labels: Mapping[str, str],
        dry_run: bool = False,
        limit: int | None = None,
        timeout: float = _MANY_S,
    ) -> Many:
        """Pause all that carry these labels ({}: all of the project), or the `limit` oldest."""
        return await do_many(
            self._connection, PAUSE_VERB, labels, dry_run=dry_run, limit=limit, timeout_s=timeout
        )

    async def resume_many(
        self,
        *,
        labels: Mapping[str, str],
        dry_run: bool = False,
        limit: int | None = None,
        timeout: float = _MANY_S,
    ) -> Many:
        """Resume all that carry these labels, or the `limit` oldest."""
        return await do_many(
            self._connection, RESUME_VERB, labels, dry_run=dry_run, limit=limit, timeout_s=timeout
        )

    async def stop_many(
        self,
        *,
        labels: Mapping[str, str],
        dry_run: bool = False,
        limit: int | None = None,
        timeout: float = _MANY_S,
    ) -> Many:
        """Stop all that carry these labels, or the `limit` oldest."""
        return await do_many(
            self._connection, STOP_VERB, labels, dry_run=dry_run, limit=limit, timeout_s=timeout
        )

    # --- the cluster ------------------------------------------------------------------------------

    async def nodes(self) -> Nodes:
        """Every node: its state, its load, what it can do."""
        with self._connection.operation("nodes") as op:
            return list((await list_nodes(self._connection, op)).nodes)

    async def queue(self) -> Lanes:
        """How many requests wait in each lane, and for how long."""
        with self._connection.operation("queue") as op:
            answer = await self._connection.call(QUEUE, QueueQuery(), op=op, idempotent=True)
            return list(answer.lanes)

    # --- not built yet ----------------------------------------------------------------------------

    async def quota(self, project: str) -> object:
        """A project's quota."""
        self._connection.refuse(
            "quota", Unsupported(f"the quota of {project} cannot be asked for yet")
        )

    async def call(
        self,
        task_type: str,
        code: str,
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes | str | None = None,
        timeout: float = 10.0,
    ) -> ExecResult:
        """Run a function in a pre-created container."""
        hint = "create a container and exec the code in it"
        err = Unsupported(f"function calls ({task_type}) are not built yet", hint=hint)
        self._connection.refuse("call", err)

    async def _create(
        self,
        count: int,
        arguments: SpecArguments,
        timeout: float,
        on_progress: Callback[Progress] | None,
        key: str | None,
    ) -> Made:
        with self._connection.operation("create") as op:
            if not isinstance(count, int) or not 1 <= count <= _MAX_COUNT:
                raise InvalidArgument(f"count={count!r} is impossible", hint=f"1 to {_MAX_COUNT}")
            timeout_s = check_seconds("timeout", timeout)
            key = random_token() if key is None else check_key(key)
            spec = build_spec(arguments)
            sizes = [CREATE_MANY_MESSAGE] * (count // CREATE_MANY_MESSAGE)
            if rest := count % CREATE_MANY_MESSAGE:
                sizes.append(rest)
            budget = Budget(timeout_s)
            messages = [
                Placing(
                    self._connection, op, spec, count=size,
                    key=key if len(sizes) == 1 else f"{key}-{number}",
                    request_id=op.request_id if len(sizes) == 1 else f"{op.request_id}-{number}",
                    budget=budget, timeout_s=timeout_s, on_progress=on_progress,
                )
                for number, size in enumerate(sizes)
            ]  # fmt: skip
            outcomes = await _all(messages)
            return [self._made(op, spec, outcome) for outcome in outcomes]

    def _made(
        self, op: Operation, spec: SandboxSpec, outcome: ReadyItem | DSecError
    ) -> Sandbox | DSecError:
        if isinstance(outcome, DSecError):
            op.identify(outcome)
            return outcome
        op.node = op.node or sandbox_node(outcome.sandbox_id)
        return Sandbox(
            self._connection, outcome.sandbox_id, backend=spec.backend, labels=spec.labels,
            request_id=op.request_id, phases_ms=outcome.phases_ms,
        )  # fmt: skip


async def _all(messages: Sequence[Placing]) -> list[ReadyItem | DSecError]:
    """Every message's outcomes in order; what one raises (a callback's error) ends them all."""
    if len(messages) == 1:
        return await messages[0].run()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(message.run()) for message in messages]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [outcome for task in tasks for outcome in task.result()]
