"""What can go wrong on the agent channel, apart from a command's own failure (which is a result).

File operations raise the builtin ``OSError`` of their errno (``FileNotFoundError``, ``IsADirectoryError``, ...).
"""

from __future__ import annotations

from .protocol import ErrorCode


class AgentError(Exception):
    """Base of everything below."""


class AgentGoneError(AgentError):
    """The connection is down: the outcome of what was under way is unknown until a new one attaches."""


class AgentProtocolError(AgentError):
    """The peer sent bytes that are not the protocol; the connection has been closed."""


class AgentRefusedError(AgentError):
    """The agent answered a request with ERROR. For LIMIT, CONFLICT and UNSUPPORTED nothing ran."""

    def __init__(self, code: ErrorCode, errno: int, message: str) -> None:
        super().__init__(f"{code.name.lower()}: {message} (errno {errno})")
        self.code = code
        self.errno = errno
        self.message = message
