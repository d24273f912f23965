"""The directory store: by digest, whole or not at all, deleted only when nobody named it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.chassis.clock import Clock
from services.edge.layers.store import DamagedImageError, DirectoryStore, StoredImage

HOUR_S = 3600.0


class SetClock(Clock):
    """A wall clock that stands where it is put, ahead of the file system's."""

    ahead_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.ahead_s


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def store(tmp_path: Path, clock: SetClock) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store", clock)


def put(store: DirectoryStore, data: bytes) -> StoredImage:
    with store.staging() as work:
        image = work / "image"
        image.write_bytes(data)
        return store.put(image)


def test_an_image_is_found_by_its_digest_and_cannot_be_written(store: DirectoryStore) -> None:
    stored = put(store, b"image")
    path = store.path(stored.digest)
    assert path.name == stored.digest
    assert path.read_bytes() == b"image"
    assert path.stat().st_mode & 0o777 == 0o444
    assert stored.size_bytes == 5
    store.verify(stored.digest, 5)


def test_the_same_bytes_are_one_file(store: DirectoryStore, tmp_path: Path) -> None:
    first = put(store, b"image")
    inode = store.path(first.digest).stat().st_ino
    assert put(store, b"image") == first
    assert store.path(first.digest).stat().st_ino == inode
    assert not list((tmp_path / "store/staging").iterdir())


def test_damage_is_found_and_named_and_publishing_again_heals_it(store: DirectoryStore) -> None:
    stored = put(store, b"image")
    path = store.path(stored.digest)
    path.chmod(0o644)
    path.write_bytes(b"imagE")
    with pytest.raises(DamagedImageError, match=stored.digest):
        store.verify(stored.digest, 5)
    path.write_bytes(b"imag")
    with pytest.raises(DamagedImageError, match="4 bytes, not 5"):
        store.verify(stored.digest, 5)
    assert put(store, b"image") == stored
    store.verify(stored.digest, 5)


@pytest.mark.parametrize("digest", ["a" * 64, "../../etc/passwd", "A" * 64, "", "a" * 63 + "/"])
def test_what_is_not_there_or_no_digest_is_not_found(store: DirectoryStore, digest: str) -> None:
    with pytest.raises(FileNotFoundError):
        store.path(digest)
    with pytest.raises(FileNotFoundError):
        store.keep(digest)


def test_an_unnamed_image_goes_after_the_grace_time_and_a_kept_one_stays(
    store: DirectoryStore, clock: SetClock
) -> None:
    named, unnamed = put(store, b"named"), put(store, b"unnamed")
    store.keep(named.digest)
    assert store.doomed(HOUR_S) == []
    assert not store.delete(unnamed.digest, HOUR_S)
    clock.ahead_s = 2 * HOUR_S
    assert store.doomed(HOUR_S) == [unnamed.digest]
    assert store.delete(unnamed.digest, HOUR_S)
    assert not store.delete(named.digest, HOUR_S)
    with pytest.raises(FileNotFoundError):
        store.path(unnamed.digest)
    store.verify(named.digest, 5)


def test_putting_a_doomed_image_again_begins_its_grace_time_anew(
    store: DirectoryStore, clock: SetClock, tmp_path: Path
) -> None:
    stored = put(store, b"image")
    mark = tmp_path / "store/doomed" / stored.digest
    os.utime(mark, (0, 0))
    assert store.doomed(HOUR_S) == [stored.digest]
    put(store, b"image")
    assert not store.delete(stored.digest, HOUR_S)
    store.keep(stored.digest)
    put(store, b"image")
    clock.ahead_s = 2 * HOUR_S
    assert store.doomed(HOUR_S) == [], "publishing a named image again must not doom it"
    store.doom(stored.digest)
    assert store.doomed(-2 * HOUR_S) == [stored.digest]


def test_what_a_killed_publisher_left_is_swept_a_day_later(tmp_path: Path) -> None:
    clock = SetClock()
    root = tmp_path / "store"
    DirectoryStore(root, clock)
    left = root / "staging/left"
    left.mkdir()
    (left / "image").write_bytes(b"half")
    DirectoryStore(root, clock)
    assert left.exists(), "it may be another node's build"
    clock.ahead_s = 25 * HOUR_S
    DirectoryStore(root, clock)
    assert not left.exists()
