"""What the agent answers, as the errors that callers know."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from libdsec.errors import (
    Conflict,
    DeadlineExceeded,
    DSecError,
    FileNotFound,
    Internal,
    InvalidArgument,
    IsADirectory,
    NotADirectory,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    Unavailable,
    Unsupported,
)

from .agent import AgentError, AgentGoneError, AgentRefusedError, AgentStartError, ErrorCode, Stage

_FILE_ERRORS: Final[dict[int, type[DSecError]]] = {
    errno.ENOENT: FileNotFound,
    errno.EISDIR: IsADirectory,
    errno.ENOTDIR: NotADirectory,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EROFS: PermissionDenied,
    errno.ENOSPC: QuotaExceeded,
    errno.EDQUOT: QuotaExceeded,
}


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Errors of the agent channel inside the block leave it as DSecErrors about `what`."""
    try:
        yield
    except AgentRefusedError as err:
        raise refusal(err, what) from err
    except AgentStartError as err:
        raise not_started(err.stage, err.errno, what) from err
    except AgentGoneError as err:
        raise Unavailable(
            f"{what}: the connection to the sandbox's agent broke",
            hint="it may have been carried out; asking again is safe",
            retry_after_s=0.5,
        ) from err
    except AgentError as err:
        raise Internal(f"{what}: {err}") from err
    except TimeoutError as err:
        raise DeadlineExceeded(f"{what} did not end in time") from err
    except ProcessLookupError as err:
        raise NotFound(f"{what}: no such command runs") from err
    except OSError as err:
        raise file_error(err, what) from err
    except ValueError as err:  # what the agent's protocol cannot carry
        raise InvalidArgument(f"{what}: {err}") from err


def refusal(err: AgentRefusedError, what: str) -> DSecError:
    match err.code:
        case ErrorCode.CONFLICT:
            return Conflict(
                f"{what} was used for another command", hint="an exec_id names one command for good"
            )
        case ErrorCode.UNKNOWN_EXEC:
            return NotFound(
                f"{what}: no such command runs, and no result of it is kept",
                hint="results are kept for 15 minutes, the last 384 of a sandbox",
            )
        case ErrorCode.SUPERSEDED:
            return Conflict(f"{what}: somebody else has taken over its output")
        case ErrorCode.LIMIT:
            return QuotaExceeded(
                f"{what}: the sandbox has no room for it ({os.strerror(err.errno)})",
                hint="end some of its processes, or give the sandbox more pids or memory",
                retry_after_s=1.0,
            )
        case ErrorCode.UNSUPPORTED:
            return Unsupported(f"{what}: {err.message}")
        case ErrorCode.SHUTTING_DOWN:
            return Unavailable(f"{what}: the sandbox is shutting down")
        case _:
            return Internal(f"{what}: {err.message}")


def not_started(stage: Stage, number: int, what: str) -> DSecError:
    """Why a command's process could not be set up; that its program is not there is a result."""
    why = os.strerror(number)
    if stage is Stage.USER:
        return InvalidArgument(
            f"{what}: the sandbox has no such user ({why})",
            hint="a name of its /etc/passwd, or a number",
        )
    if stage is Stage.CWD:
        kind = _FILE_ERRORS.get(number, InvalidArgument)
        return kind(f"{what}: its working directory cannot be entered ({why})")
    return Unavailable(f"{what} could not be set up ({stage.name.lower()}: {why})")


def file_error(err: OSError, what: str) -> DSecError:
    why = err.strerror or str(err)
    if err.errno is None:
        return Unavailable(f"{what}: {why}")
    return _FILE_ERRORS.get(err.errno, InvalidArgument)(f"{what}: {why}")
