"""The edge's side of the agent channel: one asyncio connection to one sandbox's PID 1.

It owns the connection and nothing else: no retry, no reconnection, no knowledge of sandboxes. After
an edge restart, or ``AgentGoneError``, connect afresh: the hello lists what runs, ``attach`` and
``collect`` go on with it. The protocol is described in ``aether/PROTOCOL.md``.
"""

from __future__ import annotations

from .channel import AgentChannel
from .errors import (
    AgentError,
    AgentGoneError,
    AgentProtocolError,
    AgentRefusedError,
    AgentStartError,
)
from .model import (
    AgentResult,
    ExecSpec,
    FileData,
    FileEntry,
    FileKind,
    Hello,
    Listing,
    OutputChunk,
    ProcessInfo,
)
from .process import AgentProcess
from .protocol import ErrorCode, ExitReason, KillScope, OutputStream, ProcessState, Stage

__all__ = [
    "AgentChannel",
    "AgentError",
    "AgentGoneError",
    "AgentProcess",
    "AgentProtocolError",
    "AgentRefusedError",
    "AgentResult",
    "AgentStartError",
    "ErrorCode",
    "ExecSpec",
    "ExitReason",
    "FileData",
    "FileEntry",
    "FileKind",
    "Hello",
    "KillScope",
    "Listing",
    "OutputChunk",
    "OutputStream",
    "ProcessInfo",
    "ProcessState",
    "Stage",
]
