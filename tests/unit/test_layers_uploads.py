"""Uploads: bounded in number, bytes and time; whole only if size and SHA-256 say so."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec.errors import Conflict, InvalidArgument, NotFound, QuotaExceeded
from libdsec.wire.layer import LayerKind, PublishBegin, PublishChunk, PublishCommit
from libhost.aio import HostThreads
from services.chassis.clock import Clock
from services.edge.layers.uploads import Upload, UploadLimits, Uploads

LIMITS = UploadLimits(
    max_uploads=2, max_bytes=100, max_total_bytes=150, max_chunk_bytes=60, idle_s=10.0
)


class SetClock(Clock):
    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def uploads(tmp_path: Path, clock: SetClock) -> Iterator[Uploads]:
    threads = HostThreads(2)
    yield Uploads(tmp_path / "spool", threads, LIMITS, clock)
    threads.close()


def begin(uploads: Uploads, project: str = "p", size_bytes: int | None = None) -> Upload:
    request = PublishBegin(name="l", kind=LayerKind.TOOLKIT, size_bytes=size_bytes)
    return uploads.begin(project, request)


def chunk(upload: Upload, offset: int, data: bytes) -> PublishChunk:
    return PublishChunk(upload_id=upload.upload_id, offset=offset, data=data)


def commit(upload: Upload, data: bytes) -> None:
    upload.commit = PublishCommit(
        upload_id=upload.upload_id, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )


async def test_chunks_in_any_order_and_repeated_make_the_archive(uploads: Uploads) -> None:
    upload = begin(uploads)
    for offset, data in ((3, b"def"), (0, b"abc"), (3, b"def")):
        await uploads.write("p", chunk(upload, offset, data))
    commit(upload, b"abcdef")
    assert (await uploads.check(upload)).read_bytes() == b"abcdef"


async def test_a_missing_or_damaged_chunk_is_found(uploads: Uploads) -> None:
    upload = begin(uploads)
    await uploads.write("p", chunk(upload, 3, b"def"))
    commit(upload, b"abcdef")
    with pytest.raises(InvalidArgument, match="SHA-256"):
        await uploads.check(upload)
    commit(upload, b"abcdefghi")
    with pytest.raises(InvalidArgument, match="6 of the archive's 9 bytes"):
        await uploads.check(upload)


async def test_an_upload_is_its_projects_alone(uploads: Uploads) -> None:
    upload = begin(uploads)
    with pytest.raises(NotFound):
        await uploads.write("q", chunk(upload, 0, b"x"))
    with pytest.raises(NotFound):
        uploads.get("q", upload.upload_id)


async def test_each_bound_is_refused_and_said(uploads: Uploads) -> None:
    with pytest.raises(QuotaExceeded, match="at most 100 bytes"):
        begin(uploads, size_bytes=101)
    one = begin(uploads)
    with pytest.raises(InvalidArgument, match="at most 60 bytes"):
        await uploads.write("p", chunk(one, 0, b"x" * 61))
    with pytest.raises(InvalidArgument, match="offset"):
        await uploads.write("p", chunk(one, -1, b"x"))
    with pytest.raises(QuotaExceeded, match="at most 100 bytes"):
        await uploads.write("p", chunk(one, 90, b"x" * 11))
    await uploads.write("p", chunk(one, 40, b"x" * 60))
    two = begin(uploads)
    with pytest.raises(QuotaExceeded, match="spools 100 bytes"):
        await uploads.write("p", chunk(two, 0, b"x" * 51))
    with pytest.raises(QuotaExceeded, match="already receives 2"):
        begin(uploads)


async def test_an_idle_upload_is_forgotten_with_its_spool(
    uploads: Uploads, clock: SetClock, tmp_path: Path
) -> None:
    upload = begin(uploads)
    clock.now_s = 9.0
    await uploads.write("p", chunk(upload, 0, b"x"))
    clock.now_s = 18.0
    assert uploads.expire() == 0
    clock.now_s = 20.0
    assert uploads.expire() == 1
    assert not list((tmp_path / "spool").iterdir())
    with pytest.raises(NotFound, match="begin again"):
        await uploads.write("p", chunk(upload, 1, b"x"))


async def test_a_committed_upload_takes_no_more(uploads: Uploads) -> None:
    upload = begin(uploads)
    await uploads.write("p", chunk(upload, 0, b"x"))
    commit(upload, b"x")
    with pytest.raises(Conflict):
        await uploads.write("p", chunk(upload, 1, b"y"))


def test_a_new_process_begins_with_an_empty_spool(tmp_path: Path) -> None:
    left = tmp_path / "spool/left"
    left.parent.mkdir()
    left.write_bytes(b"x")
    Uploads(tmp_path / "spool", HostThreads(1), LIMITS, SetClock())
    assert not left.exists()
