"""The closed set of errors a caller of DSec can meet.

An error says what failed, on which object, and the way out (`hint`). `retryable` and
`infrastructure` are properties of the class: the first tells a program whether the same call may
succeed later, the second tells a trainer to mask the sample instead of scoring it 0. A command that
ends with a non-zero code is a result, never an error.
"""

from __future__ import annotations

import errno
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .exec_result import ExecResult


class DeathReason(StrEnum):
    """Why a sandbox is gone; each is defined once in docs/glossary.md."""

    OOM = "oom"
    KILLED = "killed"
    DISK = "disk"
    AGENT = "agent"
    POLICY = "policy"
    NODE_PANIC = "node_panic"
    NODE_LOST = "node_lost"
    EXPIRED = "expired"
    EVICTED = "evicted"
    STOPPED = "stopped"


class DSecError(Exception):
    """Root of everything DSec raises.

    Attributes:
        code: the class's name in snake_case; what travels on the wire.
        hint: what the reader can do about it, or "".
        request_id, trace_id: what to hand to the on-call team (`dsec trace REQUEST_ID`).
        retry_after_s: when trying again makes sense, None if unknown.
    """

    code: ClassVar[str] = "dsec_error"
    retryable: ClassVar[bool] = False
    infrastructure: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        request_id: str = "",
        trace_id: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.request_id = request_id
        self.trace_id = trace_id
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        parts = [self.message]
        if self.hint:
            parts.append(f"({self.hint})")
        if self.request_id:
            parts.append(f"[request {self.request_id}]")
        return " ".join(parts)


class InvalidArgument(DSecError):
    """The request can never work as written."""

    code = "invalid_argument"


class NotFound(DSecError):
    """The named thing does not exist, or not for this project."""

    code = "not_found"


class AlreadyExists(DSecError):
    """The name is taken."""

    code = "already_exists"


class PermissionDenied(DSecError):
    """This principal may not do that."""

    code = "permission_denied"


class QuotaExceeded(DSecError):
    """The project's quota or the queue's bound is used up."""

    code = "quota_exceeded"
    retryable = True
    infrastructure = True


class NoCapacity(DSecError):
    """No node can take this now; the message counts the nodes each filter dropped."""

    code = "no_capacity"
    retryable = True
    infrastructure = True


class Conflict(DSecError):
    """The same idempotency key was used with other arguments, or a state forbids the change."""

    code = "conflict"


class DeadlineExceeded(DSecError):
    """The call's own budget ran out; what was begun is cancelled."""

    code = "deadline_exceeded"
    infrastructure = True


class Unavailable(DSecError):
    """A service or the bus does not answer."""

    code = "unavailable"
    retryable = True
    infrastructure = True


class Unsupported(DSecError):
    """The name exists, but nothing here can do or enforce it."""

    code = "unsupported"


class Internal(DSecError):
    """A bug in DSec; the details are in its logs under the trace id."""

    code = "internal"
    infrastructure = True


class DataLoss(DSecError):
    """Something captured or stored cannot be returned whole."""

    code = "data_loss"
    infrastructure = True


class FileNotFound(DSecError, FileNotFoundError):
    """No such file inside the sandbox."""

    code = "file_not_found"
    errno = errno.ENOENT


class IsADirectory(DSecError, IsADirectoryError):
    """The path inside the sandbox is a directory."""

    code = "is_a_directory"
    errno = errno.EISDIR


class NotADirectory(DSecError, NotADirectoryError):
    """A component of the path inside the sandbox is not a directory."""

    code = "not_a_directory"
    errno = errno.ENOTDIR


class SandboxDead(DSecError):
    """The sandbox is gone; `reason` says why."""

    code = "sandbox_dead"
    infrastructure = True

    def __init__(
        self, message: str, *, reason: DeathReason = DeathReason.KILLED, **kw: object
    ) -> None:
        super().__init__(message, **kw)  # type: ignore[arg-type]
        self.reason = reason

    @classmethod
    def for_reason(cls, sandbox_id: str, reason: str | None) -> SandboxDead:
        """As a listing or an info tells it; a reason of a newer server is kept in the message."""
        known = DeathReason(reason) if reason in set(DeathReason) else DeathReason.KILLED
        return cls(f"sandbox {sandbox_id} is dead: {reason or 'unknown'}", reason=known)


class ExecTimeout(DSecError):
    """The command outlived its timeout; its whole tree is gone. `result` holds what it printed."""

    code = "exec_timeout"

    def __init__(self, message: str, *, result: ExecResult | None = None, **kw: object) -> None:
        super().__init__(message, **kw)  # type: ignore[arg-type]
        self.result = result


ERRORS: dict[str, type[DSecError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument, NotFound, AlreadyExists, PermissionDenied, QuotaExceeded, NoCapacity,
        Conflict, DeadlineExceeded, Unavailable, Unsupported, Internal, DataLoss, FileNotFound,
        IsADirectory, NotADirectory, SandboxDead, ExecTimeout,
    )
}  # fmt: skip
