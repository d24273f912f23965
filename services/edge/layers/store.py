"""Where images are kept: a directory on any mount, addressed by the digest of the bytes.

    <root>/blobs/<xx>/<digest>   an immutable image; xx = the first two characters of the digest
    <root>/staging/<random>/     what is being built; nothing of it is a layer yet
    <root>/doomed/<digest>       no name is known to refer to this image since the file's mtime
    <root>/lock                  held while images or doom marks change

An image appears under its digest by rename, after its bytes are on disk: a reader sees all of it or
nothing. It is born doomed and kept once a name refers to it, so a publisher killed at any step
leaves nothing that is not collected later. Nothing here knows names. Whatever takes this place (an
object store) answers the calls of `LayerStore`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...chassis.clock import Clock

_DIGEST_BYTES = 32
_DIGEST_CHARS = frozenset("0123456789abcdef")
_STAGING_LIFE_S = 86_400.0  # longer than any build


class DamagedImageError(Exception):
    """The stored bytes are not those the digest names; `reason` says in what they differ."""

    def __init__(self, digest: str, reason: str) -> None:
        self.digest = digest
        self.reason = reason
        super().__init__(f"image {digest}: {reason}")


@dataclass(frozen=True)
class StoredImage:
    digest: str
    size_bytes: int


class LayerStore(Protocol):
    """Blocking; callers in an event loop go through HostThreads."""

    def staging(self) -> contextlib.AbstractContextManager[Path]:
        """A private directory from which `put` can rename; gone afterwards."""

    def put(self, image: Path) -> StoredImage:
        """Take the staged image, doomed until `keep`. The same bytes are stored once."""

    def keep(self, digest: str) -> None:
        """A name refers to it. Raises FileNotFoundError."""

    def path(self, digest: str) -> Path:
        """A local file with the image's bytes. Raises FileNotFoundError."""

    def verify(self, digest: str, size_bytes: int) -> None:
        """Read all of it. Raises DamagedImageError, FileNotFoundError."""

    def doom(self, digest: str) -> None:
        """No name refers to it any more: it may be deleted after a grace time."""

    def doomed(self, older_than_s: float) -> list[str]:
        """What has been doomed for that long."""

    def delete(self, digest: str, older_than_s: float) -> bool:
        """Delete it unless it has been kept or put again meanwhile; says whether it did."""


class DirectoryStore:
    """A LayerStore in a directory. Several nodes may share it if its mount has flock."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        for name in ("blobs", "staging", "doomed"):
            (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweep_staging()

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        directory = Path(tempfile.mkdtemp(dir=self._root / "staging"))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def put(self, image: Path) -> StoredImage:
        with image.open("rb") as file:
            digest = digest_of(file.fileno())
            size = os.fstat(file.fileno()).st_size
            os.fchmod(file.fileno(), 0o444)
            os.fsync(file.fileno())
        with self._locked():
            if not self._holds(digest):
                self._mark(digest).touch()
                self._place(image, self._blob(digest))
            elif self._mark(digest).exists():
                self._mark(digest).touch()  # its grace time begins anew
        return StoredImage(digest, size)

    def keep(self, digest: str) -> None:
        with self._locked():
            self.path(digest)
            self._mark(digest).unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        blob = self._blob(digest)
        if not blob.is_file():
            raise FileNotFoundError(f"no image {digest} in {self._root}")
        return blob

    def verify(self, digest: str, size_bytes: int) -> None:
        with self.path(digest).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != size_bytes:
                raise DamagedImageError(digest, f"has {size} bytes, not {size_bytes}")
            found = digest_of(file.fileno())
        if found != digest:
            raise DamagedImageError(digest, f"its bytes have the digest {found}")

    def doom(self, digest: str) -> None:
        with self._locked():
            if self._blob(digest).exists():
                self._mark(digest).touch()

    def doomed(self, older_than_s: float) -> list[str]:
        limit = self._clock.wall_s() - older_than_s
        marks = (self._root / "doomed").iterdir()
        return sorted(mark.name for mark in marks if mark.stat().st_mtime <= limit)

    def delete(self, digest: str, older_than_s: float) -> bool:
        with self._locked():
            if digest not in self.doomed(older_than_s):
                return False
            self._blob(digest).unlink(missing_ok=True)
            self._mark(digest).unlink()
        return True

    def _holds(self, digest: str) -> bool:
        """Whether the image is there and sound: publishing it again replaces a damaged one."""
        try:
            with self.path(digest).open("rb") as file:
                return digest_of(file.fileno()) == digest
        except FileNotFoundError:
            return False

    def _place(self, image: Path, target: Path) -> None:
        target.parent.mkdir(mode=0o700, exist_ok=True)
        image.replace(target)
        for directory in (target.parent, target.parent.parent, self._root / "doomed"):
            _fsync_directory(directory)

    def _blob(self, digest: str) -> Path:
        # The digest becomes a path: whatever is not one must not get that far.
        if len(digest) != 2 * _DIGEST_BYTES or not _DIGEST_CHARS.issuperset(digest):
            raise FileNotFoundError(f"{digest[:80]!r} is not a digest")
        return self._root / "blobs" / digest[:2] / digest

    def _mark(self, digest: str) -> Path:
        return self._root / "doomed" / digest

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._root / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _sweep_staging(self) -> None:
        limit = self._clock.wall_s() - _STAGING_LIFE_S
        for left in (self._root / "staging").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another node's build just ended
                if left.stat().st_mtime < limit:
                    shutil.rmtree(left, ignore_errors=True)


def digest_of(fd: int) -> str:
    """blake2b-256 of a file's bytes, in hex; does not leave the file in the page cache.

    The image is about to be read through a mount, whose pages are another set: keeping these too
    would double the memory a layer takes.
    """
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    buffer = memoryview(bytearray(1 << 20))
    offset = 0
    while count := os.preadv(fd, [buffer], offset):
        state.update(buffer[:count])
        os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)
        offset += count
    return state.hexdigest()


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
