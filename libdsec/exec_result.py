"""What a finished command left behind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExecResult:
    """A command that ended; a non-zero `exit_code` is a result, not an error.

    Attributes:
        exit_code: the command's own; 127 not found, 126 not executable, 128+n ended by signal n.
        signal: the signal that ended it, or None.
        stdout_bytes, stderr_bytes: exactly what was captured, at most the caller's cap each.
        stdout_total, stderr_total: bytes the command wrote, captured or not.
        truncated: something was dropped from either stream.
        duration_s: from start to exit as the agent inside the sandbox measured it.
        oom_killed: the kernel ended it because the sandbox was out of memory.
        request_id: of the call that brought this result, for `dsec trace`.
    """

    exit_code: int
    signal: int | None
    stdout_bytes: bytes
    stderr_bytes: bytes
    stdout_total: int
    stderr_total: int
    truncated: bool
    duration_s: float
    oom_killed: bool = False
    request_id: str = ""

    @property
    def stdout(self) -> str:
        """Captured standard output as text; what is not UTF-8 is replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Captured standard error as text; what is not UTF-8 is replaced."""
        return self.stderr_bytes.decode("utf-8", "replace")
