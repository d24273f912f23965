"""What can go wrong on the agent channel, apart from a command's own failure (which is a result).

File operations raise the builtin ``OSError`` of their errno: ``FileNotFoundError`` and so on.
"""

from __future__ import annotations

from .protocol import ErrorCode, Stage


class AgentError(Exception):
    """Base of everything below."""


class AgentGoneError(AgentError):
    """The connection is down: the outcome of what was under way is known to the next one."""


class AgentProtocolError(AgentError):
    """The peer sent bytes that are not the protocol; the connection has been closed."""


class AgentRefusedError(AgentError):
    """The agent answered a request with ERROR. For LIMIT, CONFLICT and UNSUPPORTED nothing ran."""

    def __init__(self, code: ErrorCode, errno: int, message: str) -> None:
        super().__init__(f"{code.name.lower()}: {message} (errno {errno})")
        self.code = code
        self.errno = errno
        self.message = message


class AgentStartError(AgentError):
    """A file operation could not begin: the user is unknown, or its process could not be set up."""

    def __init__(self, stage: Stage, errno: int) -> None:
        super().__init__(f"not started at stage {stage.name.lower()} (errno {errno})")
        self.stage = stage
        self.errno = errno
