"""What the edge remembers of a sandbox's commands: enough to list them and to take their input.

The agent is the one that knows whether a command runs and what it printed; this is only what the
agent does not keep. After a restart of the edge it is empty and listings lack their argv.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

COMMANDS_KEPT: Final = 1024  # per sandbox; as many as the agent keeps records of


@dataclass(eq=False)
class Command:
    """One exec_id. `readers` are the reply streams that are open on it."""

    exec_id: str
    argv: tuple[str, ...] = ()
    who_where: str = ""  # "as 'root' in '/'"
    exit_code: int | None = None
    stdin_taken: int | None = None  # bytes, None: not known since the edge restarted
    stdin_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    # The newest attachment takes the output over, so who only wants to write or to watch must see
    # whether somebody reads, and nobody may begin to in between.
    attaching: asyncio.Lock = field(default_factory=asyncio.Lock)
    window: Window | None = None

    @property
    def program(self) -> str:
        return self.argv[0] if self.argv else "exec"

    @property
    def title(self) -> str:
        """For errors."""
        return f"command {self.exec_id} {self.who_where}".rstrip()


class CommandLog:
    """The commands of one sandbox, the most recent COMMANDS_KEPT of them."""

    def __init__(self) -> None:
        self._commands: OrderedDict[str, Command] = OrderedDict()

    def get(self, exec_id: str) -> Command | None:
        return self._commands.get(exec_id)

    def note(self, exec_id: str, argv: tuple[str, ...] = ()) -> Command:
        """The entry of a command, made if it is new."""
        command = self._commands.get(exec_id)
        if command is None:
            command = self._commands[exec_id] = Command(exec_id, argv)
            while len(self._commands) > COMMANDS_KEPT:
                self._commands.popitem(last=False)
        self._commands.move_to_end(exec_id)
        return command


class Window:
    """How much output may be under way to a reader that grants credit as it consumes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._sent = 0
        self._consumed = 0
        self._changed = asyncio.Event()

    def consumed(self, total_bytes: int) -> None:
        """The reader has consumed so much since the stream began; a late message changes nothing,
        one that claims more than was sent counts for what was."""
        self._consumed = max(self._consumed, min(total_bytes, self._sent))
        self._changed.set()

    async def reserve(self, size_bytes: int) -> None:
        """Returns when a chunk of that size fits; one always fits into an empty window."""
        while self._sent > self._consumed and (
            self._sent - self._consumed + size_bytes > self._limit
        ):
            self._changed.clear()
            await self._changed.wait()
        self._sent += size_bytes
