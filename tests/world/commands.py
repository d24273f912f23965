"""Commands of the small DSec: real processes, answered as the wire contract says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import time
from pathlib import Path

from libdsec.bus import Bus, Call
from libdsec.errors import Conflict, InvalidArgument, NotFound
from libdsec.wire.defaults import CHUNK_BYTES, EXEC_WINDOW_BYTES, INLINE_BYTES
from libdsec.wire.envelope import H_OFFSET, H_STREAM
from libdsec.wire.execution import (
    KIND_OUTPUT,
    KIND_PROGRESS,
    KIND_STARTED,
    AttachExec,
    ExecCredit,
    ExecDone,
    ExecProgress,
    ExecRequest,
    ExecStarted,
    ProcessInfo,
    ProcessInput,
    ProcessListing,
    ProcessSignal,
)
from libdsec.wire.model import Empty
from libdsec.wire.sandbox import ById
from libdsec.wire.subjects import (
    ATTACH,
    EXEC,
    EXEC_CREDIT,
    EXEC_INPUT,
    EXEC_SIGNAL,
    PROCESSES,
)

_PATH = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
_DRAIN_S = 0.1


class Command:
    """One process and everything it has printed."""

    def __init__(self, request: ExecRequest) -> None:
        self.request = request
        self.pid = 0
        self.began = time.time()
        self.streams = (bytearray(), bytearray())
        self.totals = [0, 0]
        self.done: ExecDone | None = None
        self.changed = asyncio.Condition()
        self.taken = 0  # bytes of stdin
        self.sent = self.consumed = 0  # in the latest reply stream
        self._timed_out = False
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, home: Path, env: dict[str, str]) -> None:
        request = self.request
        argv = ["/bin/sh", "-c", request.shell] if request.shell is not None else [*request.argv]
        account = self._account(request.user)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=request.cwd or home,
                env={**_PATH, **env, **request.env},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                **account,
            )
        except FileNotFoundError as err:
            if request.cwd and not Path(request.cwd).is_dir():
                raise InvalidArgument(f"there is no directory {request.cwd}") from err
            await self._end(127)
            return
        except PermissionError:
            await self._end(126)
            return
        self.pid = self._process.pid
        self._tasks = [
            asyncio.create_task(self._pump(0)),
            asyncio.create_task(self._pump(1)),
        ]
        self._tasks.append(asyncio.create_task(self._watch(self._tasks[:2])))
        if request.stdin or not request.stdin_open:
            self._tasks.append(asyncio.create_task(self._feed(request.stdin)))

    def signal_all(self, number: int) -> None:
        if self.done is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def write(self, message: ProcessInput) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if self.done is not None:
            raise Conflict(f"command {self.request.exec_id} has ended")
        new = message.data[max(0, self.taken - message.offset) :]
        try:
            self._process.stdin.write(new)
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError) as err:
            raise Conflict(f"command {self.request.exec_id} takes no input") from err
        self.taken += len(new)
        if message.close:
            self._process.stdin.close()

    async def granted(self, consumed: int) -> None:
        async with self.changed:
            self.consumed = max(self.consumed, min(consumed, self.sent))
            self.changed.notify_all()

    async def close(self) -> None:
        """End whatever is left of it, children that outlived it included."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)

    def _account(self, user: str | None) -> dict[str, object]:
        if user is None or user == pwd.getpwuid(os.geteuid()).pw_name:
            return {}
        try:
            entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
        except KeyError as err:
            raise InvalidArgument(f"user {user!r} is not in the sandbox's passwd") from err
        if os.geteuid() != 0:
            raise InvalidArgument(f"user {user!r} cannot be used here")
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    async def _feed(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()
            self.taken += len(data)
            self._process.stdin.close()

    async def _pump(self, index: int) -> None:
        assert self._process is not None
        reader = (self._process.stdout, self._process.stderr)[index]
        assert reader is not None
        while chunk := await reader.read(CHUNK_BYTES):
            room = self.request.max_output_bytes - len(self.streams[index])
            async with self.changed:
                self.streams[index].extend(chunk[: max(0, room)])
                self.totals[index] += len(chunk)
                self.changed.notify_all()

    async def _watch(self, pumps: list[asyncio.Task[None]]) -> None:
        assert self._process is not None
        # The leader's exit ends the command, whoever still holds the pipes.
        try:
            async with asyncio.timeout(self.request.timeout_s):
                code = await self._exited(pumps)
        except TimeoutError:
            self._timed_out = True
            self.signal_all(signal.SIGKILL)
            code = await self._exited(pumps)
        await self._end(code)

    async def _exited(self, pumps: list[asyncio.Task[None]]) -> int:
        assert self._process is not None
        while self._process.returncode is None:
            await asyncio.sleep(0.002)
        await asyncio.wait(pumps, timeout=_DRAIN_S)
        return self._process.returncode

    async def _end(self, code: int) -> None:
        out, err = self.totals
        async with self.changed:
            self.done = ExecDone(
                exit_code=code if code >= 0 else 128 - code,
                signal=-code if code < 0 else None,
                exec_id=self.request.exec_id,
                stdout_total=out,
                stderr_total=err,
                truncated=out > len(self.streams[0]) or err > len(self.streams[1]),
                timed_out=self._timed_out,
                duration_s=time.time() - self.began,
            )
            self.changed.notify_all()


class Commands:
    """Serves the commands of one node. `mute` makes it fall silent while commands run on;
    `refuse` is raised instead of starting one; `dispatched` counts real starts."""

    def __init__(self, home: Path, *, progress_s: float = 5.0) -> None:
        self.home = home
        self.env: dict[str, str] = {}
        self.progress_s = progress_s
        self.known: dict[str, Command] = {}
        self.dispatched: list[str] = []
        self.mute = asyncio.Event()
        self.refuse: Exception | None = None
        self.lose_before_start = False

    async def serve(self, bus: Bus, node: str) -> None:
        to = {"project": "*", "node": node}
        await bus.serve(EXEC, self.exec, concurrency=512, **to)
        await bus.serve(ATTACH, self.attach, concurrency=512, **to)
        await bus.serve(EXEC_INPUT, self.input, **to)
        await bus.serve(EXEC_SIGNAL, self.signal, **to)
        await bus.serve(PROCESSES, self.processes, **to)
        await bus.subscribe(EXEC_CREDIT, self.credit, **to)

    async def close(self) -> None:
        for command in self.known.values():
            await command.close()

    async def exec(self, request: ExecRequest, call: Call) -> ExecDone | None:
        if self.refuse is not None:
            raise self.refuse
        if self.lose_before_start:
            await asyncio.Event().wait()
        command = self.known.get(request.exec_id)
        resumed = command is not None
        if command is None:
            command = self.known[request.exec_id] = Command(request)
            self.dispatched.append(request.exec_id)
            try:
                await command.start(self.home, self.env)
            except BaseException:
                del self.known[request.exec_id]
                raise
        return await self._follow(
            command, call, [0, 0], stream=request.stream, detach=request.detach, resumed=resumed
        )

    async def attach(self, request: AttachExec, call: Call) -> ExecDone | None:
        offsets = [request.stdout_offset, request.stderr_offset]
        command = self._command(request.exec_id)
        return await self._follow(
            command, call, offsets, stream=request.stream, detach=False, resumed=True
        )

    async def input(self, message: ProcessInput, call: Call) -> Empty:
        await self._command(message.exec_id).write(message)
        return Empty()

    async def signal(self, message: ProcessSignal, call: Call) -> Empty:
        command = self._command(message.exec_id)
        command.signal_all(message.signal)
        while message.signal == signal.SIGKILL and command.done is None:
            await asyncio.sleep(0.005)
        return Empty()

    async def credit(self, message: ExecCredit, call: Call) -> None:
        await self._command(message.exec_id).granted(message.consumed_bytes)

    async def processes(self, message: ById, call: Call) -> ProcessListing:
        return ProcessListing(
            processes=tuple(
                ProcessInfo(
                    exec_id=exec_id, pid=command.pid, argv=command.request.argv,
                    running=command.done is None, started_at=command.began,
                    exit_code=command.done.exit_code if command.done else None,
                )
                for exec_id, command in self.known.items()
            )
        )  # fmt: skip

    def _command(self, exec_id: str) -> Command:
        if exec_id not in self.known:
            raise NotFound(f"no command {exec_id} is remembered")
        return self.known[exec_id]

    async def _follow(
        self,
        command: Command,
        call: Call,
        offsets: list[int],
        *,
        stream: bool,
        detach: bool,
        resumed: bool,
    ) -> ExecDone | None:
        exec_id = command.request.exec_id
        started = ExecStarted(
            exec_id=exec_id, pid=command.pid, resumed=resumed, stdin_offset=command.taken
        )
        command.sent = command.consumed = 0
        await self._say(call, KIND_STARTED, started.encode())
        if detach:
            return None
        while command.done is None or (stream and self._unsent(command, offsets)):
            if not (stream and self._unsent(command, offsets)):
                await self._wait(command, call, offsets, stream)
            elif not await self._send_output(command, call, offsets):
                await self._wait_for_credit(command)
        return await self._finish(command, call, offsets, stream)

    async def _finish(
        self, command: Command, call: Call, offsets: list[int], stream: bool
    ) -> ExecDone:
        assert command.done is not None
        if stream:
            return await self._audible(command.done)
        rest = [bytes(s[o:]) for s, o in zip(command.streams, offsets, strict=True)]
        if sum(map(len, rest)) <= INLINE_BYTES:
            inline = {"stdout": rest[0], "stderr": rest[1]}
            return await self._audible(command.done.model_copy(update=inline))
        while self._unsent(command, offsets):
            if not await self._send_output(command, call, offsets):
                await self._wait_for_credit(command)
        return await self._audible(command.done)

    def _unsent(self, command: Command, offsets: list[int]) -> bool:
        return any(len(s) > o for s, o in zip(command.streams, offsets, strict=True))

    async def _send_output(self, command: Command, call: Call, offsets: list[int]) -> bool:
        sent = False
        for index, stream in enumerate(command.streams):
            if command.sent - command.consumed >= EXEC_WINDOW_BYTES:
                break
            chunk = bytes(stream[offsets[index] : offsets[index] + CHUNK_BYTES])
            if chunk:
                headers = {H_STREAM: str(index + 1), H_OFFSET: str(offsets[index])}
                await self._say(call, KIND_OUTPUT, chunk, headers)
                offsets[index] += len(chunk)
                command.sent += len(chunk)
                sent = True
        return sent

    async def _wait(self, command: Command, call: Call, offsets: list[int], stream: bool) -> None:
        """For more output, the end, or the time to say that it still runs."""
        async with command.changed:
            if command.done is not None or (stream and self._unsent(command, offsets)):
                return
            try:
                async with asyncio.timeout(self.progress_s):
                    await command.changed.wait()
                return
            except TimeoutError:
                pass
        progress = ExecProgress(
            exec_id=command.request.exec_id, running_s=time.time() - command.began,
            stdout_total=command.totals[0], stderr_total=command.totals[1],
        )  # fmt: skip
        await self._say(call, KIND_PROGRESS, progress.encode())

    async def _wait_for_credit(self, command: Command) -> None:
        async with command.changed:
            while command.sent - command.consumed >= EXEC_WINDOW_BYTES:
                await command.changed.wait()

    async def _say(
        self, call: Call, kind: str, data: bytes, headers: dict[str, str] | None = None
    ) -> None:
        if not self.mute.is_set():
            await call.send(kind, data, headers)

    async def _audible(self, done: ExecDone) -> ExecDone:
        while self.mute.is_set():
            await asyncio.sleep(0.02)
        return done
