"""A command that nobody has to wait for: it lives on when the client goes, and is found again."""

from __future__ import annotations

import asyncio
import signal as signals
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from .connection import Connection
from .errors import Conflict, DeadlineExceeded, ExecTimeout, Unsupported
from .exec_result import ExecResult
from .execution import Output, Reading
from .wire.defaults import CHUNK_BYTES, MAX_OUTPUT_BYTES
from .wire.execution import ProcessInput, ProcessSignal
from .wire.ids import sandbox_node
from .wire.subjects import EXEC_INPUT, EXEC_SIGNAL

INPUT_S = 3600.0  # a command may be slow to read what is written to it


@dataclass(frozen=True)
class Exited:
    """The last event of a process; `timed_out`: its own timeout ended it, and its whole tree."""

    result: ExecResult
    timed_out: bool = False


Event = Output | Exited


class Process:
    """A started command. Iterate for its output and its end.

    It has one reader at a time: who attaches takes over, and the one before gets Conflict.

    Attributes:
        exec_id: attaches to it again, from any client: `sandbox.attach(exec_id, offset)`.
        pid: inside the sandbox; 0 if it had already ended.
    """

    def __init__(
        self,
        connection: Connection,
        sandbox_id: str,
        exec_id: str,
        pid: int,
        *,
        offsets: tuple[int, int] = (0, 0),
        stdin_offset: int = 0,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> None:
        self._connection = connection
        self._sandbox_id = sandbox_id
        self._node = sandbox_node(sandbox_id)
        self.exec_id = exec_id
        self.pid = pid
        self._offsets = offsets
        self._stdin_offset = stdin_offset
        self._writing = asyncio.Lock()
        self._max_output_bytes = max_output_bytes

    def __repr__(self) -> str:
        return f"<Process {self.exec_id} pid {self.pid} in {self._sandbox_id}>"

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Output from this handle's offset on, then the end. A slow reader slows the command.

        Raises:
            SandboxDead, Unavailable, NotFound: there is nothing to read from any more.
        """
        with self._connection.operation("attach", node=self._node, current=False) as op:
            reading = Reading(
                self._connection, op, self._sandbox_id, self.exec_id,
                capture_bytes=self._max_output_bytes, offsets=self._offsets,
            )  # fmt: skip
            async for output in reading.outputs():
                yield output
            yield Exited(reading.result, reading.timed_out)

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """Wait for its end; the result holds the output from this handle's offset on.

        Raises:
            ExecTimeout: the command's own timeout ended it.
            DeadlineExceeded: it still runs after `timeout` seconds.
        """
        with self._connection.operation("wait", node=self._node) as op:
            reading = Reading(
                self._connection, op, self._sandbox_id, self.exec_id,
                capture_bytes=self._max_output_bytes, offsets=self._offsets, stream=False,
            )  # fmt: skip
            try:
                async with asyncio.timeout(timeout):
                    async for _ in reading.outputs():
                        pass
            except TimeoutError:
                raise DeadlineExceeded(
                    f"command {self.exec_id} still runs after {timeout:g} s",
                    hint="it goes on; kill() ends it",
                ) from None
            return ended(reading)

    async def write(self, data: bytes | str) -> None:
        """Write to its standard input; returns when the sandbox has taken it.

        Raises:
            Conflict: the input is closed, or the command has ended.
        """
        raw = data.encode() if isinstance(data, str) else data
        for first in range(0, len(raw), CHUNK_BYTES):
            await self._input(raw[first : first + CHUNK_BYTES], close=False)

    async def close_stdin(self) -> None:
        """End of input. Idempotent; the input of a command that has ended is closed."""
        with suppress(Conflict):
            await self._input(b"", close=True)

    async def kill(self, signal: int = signals.SIGKILL, *, tree: bool | None = None) -> None:
        """Send a signal; with SIGKILL it returns when the command's whole tree is gone.

        Args:
            tree: to everything it started as well; default: only for SIGKILL.
        """
        whole = signal == signals.SIGKILL if tree is None else tree
        with self._connection.operation("kill", node=self._node) as op:
            message = ProcessSignal(
                sandbox_id=self._sandbox_id, exec_id=self.exec_id, signal=int(signal), tree=whole
            )
            await self._connection.call(EXEC_SIGNAL, message, op=op, node=self._node)

    async def resize(self, rows: int, columns: int) -> None:
        """Change its terminal's size.

        Raises:
            Unsupported: commands have no terminal yet.
        """
        err = Unsupported(
            f"command {self.exec_id} has no terminal to make {rows}x{columns}",
            hint="tty=True is not built yet",
        )
        self._connection.refuse("resize", err)

    async def _input(self, data: bytes, *, close: bool) -> None:
        # The offset makes a repeated chunk harmless; the lock keeps two writers' chunks apart.
        async with self._writing:
            with self._connection.operation("write", node=self._node) as op:
                message = ProcessInput(
                    sandbox_id=self._sandbox_id,
                    exec_id=self.exec_id,
                    offset=self._stdin_offset,
                    data=data,
                    close=close,
                )
                await self._connection.call(
                    EXEC_INPUT, message, op=op, node=self._node,
                    budget_s=INPUT_S, idempotent=True,
                )  # fmt: skip
            self._stdin_offset += len(data)


def ended(reading: Reading) -> ExecResult:
    """The result, or ExecTimeout with it inside."""
    result = reading.result
    if reading.timed_out:
        raise ExecTimeout(
            f"the command was ended by its timeout after {result.duration_s:.1f} s",
            hint="its whole process tree is gone; the partial output is in .result",
            result=result,
        )
    return result
