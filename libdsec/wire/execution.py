"""Commands: one request, answered by a stream on the reply subject.

The stream is `started`, raw `output` chunks (headers Dsec-Stream and Dsec-Offset, body = bytes),
`progress` every EXEC_PROGRESS_S while nothing else is said, then `result`. A result up to
INLINE_BYTES carries its output itself and no chunk is sent, unless the caller asked to stream.
Chunks in flight are bounded by EXEC_WINDOW_BYTES: the reader grants more with ExecCredit.
"""

from __future__ import annotations

from . import defaults as d
from .model import Message

KIND_STARTED = "started"
KIND_OUTPUT = "output"
KIND_PROGRESS = "progress"
KIND_RESULT = "result"


class ExecRequest(Message):
    sandbox_id: str
    exec_id: str
    argv: tuple[str, ...] = ()  # or `shell`
    shell: str | None = None  # run as /bin/sh -c
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    stdin: bytes = b""
    stdin_open: bool = False  # more stdin follows as ProcessInput
    timeout_s: float | None = None  # no limit
    max_output_bytes: int = d.MAX_OUTPUT_BYTES
    stream: bool = False  # send output as it comes
    detach: bool = False  # answer with `started` as the last message
    tty: bool = False


class ExecStarted(Message):
    exec_id: str
    pid: int
    resumed: bool = False  # the id was known: this attaches to it
    stdin_offset: int = 0  # bytes of stdin taken so far: where a new writer goes on


class ExecProgress(Message):
    exec_id: str
    running_s: float
    stdout_total: int = 0
    stderr_total: int = 0


class ExecDone(Message):
    exec_id: str
    exit_code: int
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_total: int = 0
    stderr_total: int = 0
    truncated: bool = False
    timed_out: bool = False
    duration_s: float = 0.0
    recorded: bool = False  # a retry was answered from the record
    oom_killed: bool = False  # by SIGKILL, while the kernel killed in this sandbox for memory


class ExecCredit(Message):
    """The reader has consumed this much output of both streams together."""

    sandbox_id: str
    exec_id: str
    consumed_bytes: int


class AttachExec(Message):
    """Answered like an ExecRequest, from these offsets."""

    sandbox_id: str
    exec_id: str
    stdout_offset: int = 0
    stderr_offset: int = 0
    max_output_bytes: int = d.MAX_OUTPUT_BYTES
    stream: bool = False  # send output as it comes


class ProcessInput(Message):
    sandbox_id: str
    exec_id: str
    offset: int
    data: bytes = b""
    close: bool = False


class ProcessSignal(Message):
    sandbox_id: str
    exec_id: str
    signal: int
    tree: bool = False


class ProcessInfo(Message):
    exec_id: str
    pid: int
    argv: tuple[str, ...]
    running: bool
    started_at: float
    exit_code: int | None = None


class ProcessListing(Message):
    processes: tuple[ProcessInfo, ...] = ()
