"""One edge per node: held for life by whoever runs, seen at once by whoever comes second."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from libdsec.errors import Conflict


@contextmanager
def only_edge(lock_file: Path, node: str) -> Iterator[None]:
    """The kernel lets go of it when the process ends, however it ends.

    Raises:
        Conflict: another edge serves this node; its pid is in the message.
    """
    lock_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
            raise Conflict(
                f"another edge serves node {node}: process {holder}",
                hint=f"stop it first, or give this one another node name (lock: {lock_file})",
            ) from err
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)
