"""The values that go into and come out of the agent channel. Pure data: no I/O, no wire format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from stat import S_ISDIR, S_ISLNK, S_ISREG

from .protocol import ExitFlag, ExitReason, OutputStream, ProcessState, Stage

DEFAULT_CAPTURE_BYTES = 1024 * 1024

OnOutput = Callable[[OutputStream, int, bytes], None]
"""``(stream, offset, data)``; an offset above the expected one means lost bytes. Must not raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecSpec:
    """One command. ``exec_id`` makes it idempotent, within what the agent keeps of the past."""

    exec_id: str
    argv: tuple[str | bytes, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # the whole environment
    cwd: str = "/"
    user: str = ""  # name or uid, optionally ":group"; empty is root
    stdin_pipe: bool = False
    no_new_privs: bool = False
    timeout_s: float | None = None
    capture_bytes: int | None = DEFAULT_CAPTURE_BYTES  # per stream; None streams without end
    digest: int = 0  # 64 bits of a hash of the arguments; 0 compares nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """How a command ended. ``stdout`` and ``stderr`` are empty unless the call collects them."""

    exec_id: str
    exit_code: int
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_total: int
    stderr_total: int
    stdout_dropped: int  # within the capture limit, but lost while nobody read
    stderr_dropped: int
    started_ns: int  # the agent's CLOCK_MONOTONIC
    ended_ns: int
    reason: ExitReason
    stage: Stage  # NONE unless the command did not start
    errno: int
    flags: ExitFlag
    value: int = 0  # a file operation's number
    known: bool = False  # attached to or replayed, not started by this request

    @property
    def duration_s(self) -> float:
        return (self.ended_ns - self.started_ns) / 1e9

    @property
    def timed_out(self) -> bool:
        return ExitFlag.TIMED_OUT in self.flags

    @property
    def truncated(self) -> bool:
        """Of a collected result: some output is missing, being beyond the limit or lost."""
        return len(self.stdout) < self.stdout_total or len(self.stderr) < self.stderr_total


@dataclass(frozen=True, slots=True)
class OutputChunk:
    stream: OutputStream
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class FileData:
    data: bytes
    size: int  # of the whole file


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    exec_id: str
    pid: int | None
    state: ProcessState
    started_ns: int
    ended_ns: int | None
    stdout_total: int
    stdout_kept_from: int
    stderr_total: int
    stderr_kept_from: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    major: int
    minor: int
    boot_id: bytes  # changes if PID 1 was ever another one
    now_ns: int
    leaf_cgroups: bool
    max_frame: int
    max_live: int
    max_records: int
    stdin_window: int
    ring_bytes: int
    pool_bytes: int
    retain_bytes: int
    retain_s: int
    processes: tuple[ProcessInfo, ...]


class FileKind(StrEnum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    name: str  # undecodable bytes as surrogate escapes, as os.fsdecode does
    mode: int  # st_mode, type bits included
    uid: int
    gid: int
    size: int
    mtime_ns: int
    target: str  # of a symbolic link, else empty

    @property
    def kind(self) -> FileKind:
        if S_ISREG(self.mode):
            return FileKind.FILE
        if S_ISDIR(self.mode):
            return FileKind.DIRECTORY
        return FileKind.SYMLINK if S_ISLNK(self.mode) else FileKind.OTHER


@dataclass(frozen=True, slots=True)
class Listing:
    entries: tuple[FileEntry, ...]
    total: int  # entries in the directory, also those beyond the limit
