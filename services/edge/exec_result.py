"""A command's end as its caller is told. Pure."""

from __future__ import annotations

import os

from libdsec.wire.execution import ExecDone

from .agent import AgentResult, ExitReason, OutputStream, Stage
from .agent_errors import not_started
from .relay import Relay


def exec_done(
    result: AgentResult, relay: Relay, *, what: str, program: str, recorded: bool, oom_killed: bool
) -> ExecDone:
    """Raises a DSecError for a command that could not be set up. One whose program is missing
    (127) or cannot be executed (126) is a result, with the reason on its standard error."""
    stdout = stderr = b""
    if relay.inline:
        stdout, stderr = relay.output(OutputStream.STDOUT), relay.output(OutputStream.STDERR)
    stderr_total = result.stderr_total
    if result.reason is ExitReason.NOT_STARTED:
        if result.stage is not Stage.EXEC:
            raise not_started(result.stage, result.errno, what)
        stderr = f"{program}: {os.strerror(result.errno)}\n".encode()
        stderr_total = len(stderr)
    return ExecDone(
        exec_id=result.exec_id,
        exit_code=result.exit_code,
        signal=result.signal,
        stdout=stdout,
        stderr=stderr,
        stdout_total=result.stdout_total,
        stderr_total=stderr_total,
        truncated=relay.lacks(result.stdout_total, result.stderr_total),
        timed_out=result.timed_out,
        duration_s=result.duration_s,
        recorded=recorded,
        oom_killed=oom_killed,
    )
