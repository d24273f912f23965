"""The error as it travels."""

from __future__ import annotations

from ..errors import ERRORS, DeathReason, DSecError, Internal, SandboxDead
from .model import Message


class ErrorReply(Message):
    """What went wrong, for the caller; never the text of an unexpected exception."""

    code: str
    message: str
    hint: str = ""
    request_id: str = ""
    trace_id: str = ""
    retry_after_s: float | None = None
    reason: str | None = None  # SandboxDead only

    @classmethod
    def of(cls, err: DSecError, *, request_id: str = "", trace_id: str = "") -> ErrorReply:
        return cls(
            code=err.code,
            message=err.message,
            hint=err.hint,
            request_id=err.request_id or request_id,
            trace_id=err.trace_id or trace_id,
            retry_after_s=err.retry_after_s,
            reason=err.reason.value if isinstance(err, SandboxDead) else None,
        )

    def exception(self) -> DSecError:
        """The typed error; a code from a newer server becomes Internal and keeps its name."""
        kind = ERRORS.get(self.code)
        extra: dict[str, object] = {}
        message = self.message
        if kind is None:
            kind, message = Internal, f"{self.code}: {self.message}"
        if kind is SandboxDead and self.reason in set(DeathReason):
            extra["reason"] = DeathReason(self.reason)
        return kind(
            message,
            hint=self.hint,
            request_id=self.request_id,
            trace_id=self.trace_id,
            retry_after_s=self.retry_after_s,
            **extra,
        )
