"""Archives on their way from a caller to this edge: a bounded number of spool files.

Chunks may come in any order and more than once, so a caller can keep several in flight and repeat
what was not answered; whether the archive arrived whole is decided by its size and SHA-256 at the
end. An upload lives in this process only: after a restart its id is unknown and the caller begins
again. Each of the bounds says so when it is met.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from libdsec.errors import Conflict, DSecError, InvalidArgument, NotFound, QuotaExceeded
from libdsec.wire.defaults import FILE_CHUNK_BYTES
from libdsec.wire.ids import random_name
from libdsec.wire.layer import LayerInfo, PublishBegin, PublishChunk, PublishCommit
from libhost.aio import HostThreads

from ...chassis.clock import Clock
from .failure import disk_failure

_IO_TIMEOUT_S = 30.0
_HASH_BYTES_PER_S = 50e6


@dataclass(frozen=True)
class UploadLimits:
    """Of one edge. `max_bytes` bounds each archive, `max_total_bytes` all that are spooled."""

    max_uploads: int = 16
    max_bytes: int = 32 << 30
    max_total_bytes: int = 64 << 30
    max_chunk_bytes: int = FILE_CHUNK_BYTES
    idle_s: float = 300.0


@dataclass
class Upload:
    """begin -> write (any number) -> check -> forgotten when idle."""

    upload_id: str
    project: str
    begin: PublishBegin
    spool: Path
    touched: float
    extent: int = 0  # offset behind the last byte written so far
    received: int = 0
    commit: PublishCommit | None = None
    work: asyncio.Task[LayerInfo | DSecError] | None = None  # what became of the commit


class Uploads:
    """The spool directory is this object's alone, and is emptied when it starts."""

    def __init__(
        self,
        directory: Path,
        threads: HostThreads,
        limits: UploadLimits,
        clock: Clock,
    ) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
        self._directory = directory
        self._threads = threads
        self.limits = limits
        self._clock = clock
        self._uploads: dict[str, Upload] = {}

    def __len__(self) -> int:
        return len(self._uploads)

    def begin(self, project: str, request: PublishBegin) -> Upload:
        """
        Raises:
            QuotaExceeded: too many uploads at once, or more bytes announced than may be spooled.
        """
        self.expire()
        if len(self._uploads) >= self.limits.max_uploads:
            raise QuotaExceeded(
                f"this edge already receives {len(self._uploads)} layers", retry_after_s=5.0
            )
        upload_id = random_name(16)
        spool = self._directory / upload_id
        upload = Upload(upload_id, project, request, spool, self._clock.monotonic_s())
        self._check_room(upload, request.size_bytes or 0)
        spool.touch(mode=0o600)
        self._uploads[upload_id] = upload
        return upload

    def get(self, project: str, upload_id: str) -> Upload:
        """The upload, which is no longer idle now. Raises NotFound."""
        upload = self._uploads.get(upload_id)
        if upload is None or upload.project != project:
            raise NotFound(
                f"no upload {upload_id[:80]!r} here",
                hint=f"it ended, or nothing came for {self.limits.idle_s:.0f} s: begin again",
            )
        upload.touched = self._clock.monotonic_s()
        return upload

    async def write(self, project: str, chunk: PublishChunk) -> int:
        """
        Returns the bytes received so far, repeated ones included.

        Raises:
            NotFound, InvalidArgument, Conflict (it is committed already), QuotaExceeded.
        """
        upload = self.get(project, chunk.upload_id)
        if len(chunk.data) > self.limits.max_chunk_bytes or chunk.offset < 0:
            raise InvalidArgument(
                f"a chunk has at most {self.limits.max_chunk_bytes} bytes and an offset from 0 on"
            )
        if upload.commit is not None:
            raise Conflict(f"upload {upload.upload_id} is committed and takes no more")
        end = chunk.offset + len(chunk.data)
        self._check_room(upload, end)
        upload.extent = max(upload.extent, end)
        try:
            await self._threads.run(_IO_TIMEOUT_S, _write_at, upload.spool, end, chunk.data)
        except OSError as err:
            raise disk_failure(err) from err
        upload.received += len(chunk.data)
        upload.touched = self._clock.monotonic_s()
        return upload.received

    async def check(self, upload: Upload) -> Path:
        """The archive, proven to be what the caller sent. Raises InvalidArgument."""
        commit = upload.commit
        assert commit is not None
        if upload.extent != commit.size_bytes:
            raise InvalidArgument(
                f"{upload.extent} of the archive's {commit.size_bytes} bytes have arrived"
            )
        timeout_s = _IO_TIMEOUT_S + commit.size_bytes / _HASH_BYTES_PER_S
        found = await self._threads.run(timeout_s, _sha256, upload.spool)
        if found != commit.sha256:
            raise InvalidArgument(
                f"the archive arrived with SHA-256 {found}, not {commit.sha256[:80]}",
                hint="a chunk is missing or damaged: upload it again",
            )
        return upload.spool

    def discard_spool(self, upload: Upload) -> None:
        """Its bytes are no longer needed; its id stays known until it is idle."""
        upload.spool.unlink(missing_ok=True)
        upload.extent = 0

    def expire(self) -> int:
        """Forget what has been idle; returns how many uploads that were."""
        limit = self._clock.monotonic_s() - self.limits.idle_s
        done = [u for u in self._uploads.values() if u.work is None or u.work.done()]
        idle = [u for u in done if u.touched < limit]
        for upload in idle:
            self.discard_spool(upload)
            del self._uploads[upload.upload_id]
        return len(idle)

    def _check_room(self, upload: Upload, size_bytes: int) -> None:
        if size_bytes > self.limits.max_bytes:
            raise QuotaExceeded(
                f"layer {upload.begin.name}: an archive has at most {self.limits.max_bytes} bytes"
            )
        others = sum(u.extent for u in self._uploads.values() if u is not upload)
        if others + size_bytes > self.limits.max_total_bytes:
            raise QuotaExceeded(
                f"this edge already spools {others} bytes of other layers", retry_after_s=30.0
            )


def _write_at(path: Path, end: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        view = memoryview(data)
        offset = end - len(data)
        while view:
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count
    finally:
        os.close(fd)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
