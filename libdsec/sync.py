"""The client without `await`: the same names, for threads, Ray actors and forked processes.

Nothing is written twice. Each blocking method is made from its asynchronous one by `blocking`,
which keeps its signature for type checkers and its documentation for readers. One event loop in one
thread serves the whole process; callbacks run on that thread and must not block.

After a fork the child has its own loop and connects anew on its first call. What it inherited from
its parent is kept, untouched, for ever: closing it here would disturb the parent's connection.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
from collections.abc import AsyncIterable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from . import client as _client
from . import files as _files
from . import layers as _layers
from . import process as _process
from . import sandbox as _sandbox
from . import selection as _selection
from .errors import DSecError, InvalidArgument
from .process import Event
from .wire.sandbox import SandboxInfo

__all__ = ["DSecClient", "Files", "Layers", "Process", "Sandbox", "SandboxListing"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
A = TypeVar("A")
Inner = TypeVar("Inner")

_STOP_S = 2.0


class _Loop:
    """The process's event loop, in a thread of its own that is started on first use."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inherited: list[object] = []

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run `work` on the loop and wait for it; an interrupt cancels it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidArgument(
                "a blocking call was made from a callback, which runs on the event loop",
                hint="hand the work to another thread",
            )
        over = threading.Event()

        async def tracked() -> R:
            try:
                return await work
            finally:
                over.set()

        future = asyncio.run_coroutine_threadsafe(tracked(), self._running())
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                over.wait(_STOP_S)  # a cancelled create withdraws its request
            raise

    def forget(self) -> None:
        """In a forked child: the parent's loop and its thread are not here."""
        self._inherited.append((self._loop, self._thread))
        self._starting = threading.Lock()
        self._loop = self._thread = None

    def stop(self) -> None:
        loop, thread = self._loop, self._thread
        if loop is not None and thread is not None and thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_STOP_S)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=loop.run_forever, name="libdsec-sync", daemon=True
                )
                self._thread.start()
                self._loop = loop
            return self._loop


_LOOP = _Loop()
os.register_at_fork(after_in_child=_LOOP.forget)
atexit.register(_LOOP.stop)


class _Blocking(Generic[Inner]):
    """A blocking face of `_inner()`, the asynchronous object of this process."""

    def _inner(self) -> Inner:
        raise NotImplementedError


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """A method that waits for the asynchronous one."""

    @functools.wraps(method)
    def wait(self: _Blocking[A], *args: P.args, **kwargs: P.kwargs) -> R:
        return _LOOP.run(method(self._inner(), *args, **kwargs))

    return cast("Callable[Concatenate[Any, P], R]", wait)


def blocking_as(
    wrap: Callable[[Any, R], S],
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], S]:
    """As `blocking`, its result given a blocking face as well."""

    @functools.wraps(method)
    def wait(self: _Blocking[A], *args: P.args, **kwargs: P.kwargs) -> S:
        return wrap(self, _LOOP.run(method(self._inner(), *args, **kwargs)))

    return cast("Callable[Concatenate[Any, P], S]", wait)


def iterate(source: AsyncIterable[R]) -> Iterator[R]:
    """An asynchronous iterator, one blocking step at a time."""
    iterator = aiter(source)

    async def step() -> R:
        return await anext(iterator)

    try:
        while True:
            try:
                yield _LOOP.run(step())
            except StopAsyncIteration:
                return
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            _LOOP.run(close())


class Process(_Blocking[_process.Process]):
    """See `libdsec.process.Process`."""

    def __init__(self, owner: Sandbox, process: _process.Process) -> None:
        self._process = process

    @property
    def exec_id(self) -> str:
        return self._process.exec_id

    @property
    def pid(self) -> int:
        return self._process.pid

    def __iter__(self) -> Iterator[Event]:
        return iterate(self._process)

    wait = blocking(_process.Process.wait)
    write = blocking(_process.Process.write)
    close_stdin = blocking(_process.Process.close_stdin)
    kill = blocking(_process.Process.kill)
    resize = blocking(_process.Process.resize)

    def _inner(self) -> _process.Process:
        return self._process


class Files(_Blocking[_files.Files]):
    """See `libdsec.files.Files`."""

    def __init__(self, owner: Sandbox) -> None:
        self._owner = owner

    read = blocking(_files.Files.read)
    read_text = blocking(_files.Files.read_text)
    write = blocking(_files.Files.write)
    list = blocking(_files.Files.list)
    stat = blocking(_files.Files.stat)
    exists = blocking(_files.Files.exists)
    remove = blocking(_files.Files.remove)
    rename = blocking(_files.Files.rename)
    make_dir = blocking(_files.Files.make_dir)
    upload = blocking(_files.Files.upload)
    download = blocking(_files.Files.download)

    def _inner(self) -> _files.Files:
        return self._owner._inner().files


class Sandbox(_Blocking[_sandbox.Sandbox]):
    """See `libdsec.sandbox.Sandbox`."""

    def __init__(self, client: DSecClient, sandbox: _sandbox.Sandbox) -> None:
        self._client = client
        self._made = sandbox
        self.id = sandbox.id
        self.node = sandbox.node
        self.backend = sandbox.backend
        self.labels = sandbox.labels
        self.request_id = sandbox.request_id
        self.phases_ms = sandbox.phases_ms
        self.files = Files(self)

    def __repr__(self) -> str:
        return f"<Sandbox {self.id}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _LOOP.run(self._inner().__aexit__(kind, err, traceback))

    exec = blocking(_sandbox.Sandbox.exec)
    run_shell = blocking(_sandbox.Sandbox.run_shell)
    start = blocking_as(Process, _sandbox.Sandbox.start)
    attach = blocking_as(Process, _sandbox.Sandbox.attach)
    processes = blocking(_sandbox.Sandbox.processes)
    info = blocking(_sandbox.Sandbox.info)
    metrics = blocking(_sandbox.Sandbox.metrics)
    pause = blocking(_sandbox.Sandbox.pause)
    resume = blocking(_sandbox.Sandbox.resume)
    stop = blocking(_sandbox.Sandbox.stop)
    extend = blocking(_sandbox.Sandbox.extend)
    set_network = blocking(_sandbox.Sandbox.set_network)
    set_phase = blocking(_sandbox.Sandbox.set_phase)
    audit = blocking(_sandbox.Sandbox.audit)
    session = blocking(_sandbox.Sandbox.session)
    pack_diff = blocking(_sandbox.Sandbox.pack_diff)
    fork = blocking(_sandbox.Sandbox.fork)
    forward = blocking(_sandbox.Sandbox.forward)
    http = blocking(_sandbox.Sandbox.http)

    def _inner(self) -> _sandbox.Sandbox:
        return self._made.bound_to(self._client._inner()._connection)


class Layers(_Blocking[_layers.Layers]):
    """See `libdsec.layers.Layers`."""

    def __init__(self, client: DSecClient) -> None:
        self._client = client

    publish = blocking(_layers.Layers.publish)
    list = blocking(_layers.Layers.list)
    info = blocking(_layers.Layers.info)
    remove = blocking(_layers.Layers.remove)
    import_oci = blocking(_layers.Layers.import_oci)

    def _inner(self) -> _layers.Layers:
        return self._client._inner().layers


class SandboxListing:
    """An iterator of SandboxInfo; once it runs, `coverage` says who has not answered."""

    def __init__(self, listing: _selection.SandboxListing) -> None:
        self._listing = listing

    def __iter__(self) -> Iterator[SandboxInfo]:
        return iterate(self._listing)

    @property
    def coverage(self) -> _selection.Coverage:
        return self._listing.coverage


def listing(
    method: Callable[Concatenate[A, P], _selection.SandboxListing],
) -> Callable[Concatenate[Any, P], SandboxListing]:
    """A method whose listing is iterated without `async`."""

    @functools.wraps(method)
    def listed(self: _Blocking[A], *args: P.args, **kwargs: P.kwargs) -> SandboxListing:
        return SandboxListing(method(self._inner(), *args, **kwargs))

    return cast("Callable[Concatenate[Any, P], SandboxListing]", listed)


def _sandboxes(
    client: DSecClient, made: list[_sandbox.Sandbox | DSecError]
) -> list[Sandbox | DSecError]:
    return [Sandbox(client, m) if isinstance(m, _sandbox.Sandbox) else m for m in made]


class DSecClient(_Blocking[_client.DSecClient]):
    """See `libdsec.client.DSecClient`. May be shared by threads, and used after a fork."""

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
        self._make = functools.partial(
            _client.DSecClient, servers, project=project, credentials=credentials, user=user,
            password=password, ca=ca, context=context,
        )  # fmt: skip
        self._by_pid: dict[int, _client.DSecClient] = {os.getpid(): self._make()}
        self.layers = Layers(self)

    @property
    def project(self) -> str:
        return self._inner().project

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    open = blocking(_client.DSecClient.open)
    close = blocking(_client.DSecClient.close)
    create = blocking_as(Sandbox, _client.DSecClient.create)
    create_many = blocking_as(_sandboxes, _client.DSecClient.create_many)
    run_container = blocking_as(Sandbox, _client.DSecClient.run_container)
    connect = blocking_as(Sandbox, _client.DSecClient.connect)
    pause_many = blocking(_client.DSecClient.pause_many)
    resume_many = blocking(_client.DSecClient.resume_many)
    stop_many = blocking(_client.DSecClient.stop_many)
    nodes = blocking(_client.DSecClient.nodes)
    queue = blocking(_client.DSecClient.queue)
    quota = blocking(_client.DSecClient.quota)
    call = blocking(_client.DSecClient.call)

    list = listing(_client.DSecClient.list)

    def _inner(self) -> _client.DSecClient:
        # The parent's client stays in the table: see the module's text.
        pid = os.getpid()
        if pid not in self._by_pid:
            self._by_pid.setdefault(pid, self._make())
        return self._by_pid[pid]
