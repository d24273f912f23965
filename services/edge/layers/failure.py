"""What an error of the disk means to somebody who publishes a layer."""

from __future__ import annotations

import errno

from libdsec.errors import DeadlineExceeded, DSecError, Internal, QuotaExceeded

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def no_space() -> QuotaExceeded:
    return QuotaExceeded(
        "the publishing node has no disk space left for the layer",
        hint="an operator frees space in the layer store or gives it more",
    )


def disk_failure(err: OSError) -> DSecError:
    """TimeoutError is an OSError too: a step that took longer than it may."""
    if isinstance(err, TimeoutError):
        return DeadlineExceeded(f"publishing the layer took too long: {err or 'a step of it'}")
    if err.errno in _FULL:
        return no_space()
    return Internal(f"publishing the layer failed: {err}")
