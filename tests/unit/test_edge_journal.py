"""The journal keeps what was put, whatever happened to the end or the middle of its file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.journal import Journal, JournalBrokenError, JournalFullError
from services.edge.journal_file import encode_line, load

KEYS = st.text("abc.", min_size=1, max_size=4)
VALUES = st.none() | st.text(max_size=8).map(lambda text: repr(text).encode())
CHANGES = st.lists(st.tuples(KEYS, VALUES), max_size=20)


def replay(changes: list[tuple[str, bytes | None]]) -> dict[str, bytes]:
    entries: dict[str, bytes] = {}
    for key, value in changes:
        if value is None:
            entries.pop(key, None)
        else:
            entries[key] = value
    return entries


@given(CHANGES)
def test_reading_gives_the_last_value_of_every_key(changes: list[tuple[str, bytes | None]]) -> None:
    loaded = load(b"".join(encode_line(*change) for change in changes))
    assert loaded.entries == replay(changes)
    assert not loaded.damaged
    assert not loaded.torn


@given(CHANGES, st.data())
def test_a_torn_end_loses_only_what_was_being_written(
    changes: list[tuple[str, bytes | None]], data: st.DataObject
) -> None:
    lines = [encode_line(*change) for change in changes]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    survivors = 0
    while survivors < len(lines) and sum(map(len, lines[: survivors + 1])) <= cut:
        survivors += 1
    loaded = load(whole[:cut])
    assert loaded.entries == replay(changes[:survivors])
    assert loaded.sound_bytes == sum(map(len, lines[:survivors]))
    assert not loaded.damaged


@given(CHANGES.filter(bool), st.data())
def test_a_damaged_line_costs_no_other_line(
    changes: list[tuple[str, bytes | None]], data: st.DataObject
) -> None:
    lines = [encode_line(*change) for change in changes]
    hit = data.draw(st.integers(0, len(lines) - 1))
    position = data.draw(st.integers(0, len(lines[hit]) - 2))
    flipped = bytearray(lines[hit])
    flipped[position] ^= 0x01
    if ord("\n") in flipped[:-1]:
        return  # two damaged lines instead of one: the same promise, another count
    lines[hit] = bytes(flipped)
    loaded = load(b"".join(lines))
    assert loaded.damaged == (bytes(flipped[:-1]),)
    assert loaded.entries == replay(changes[:hit] + changes[hit + 1 :])


async def test_a_successor_reads_what_was_put(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.put("a.1", b'{"x":1}')
    journal.put("a.2", b"2")
    journal.put("b.1", b"3")
    journal.drop("a.2")
    journal.close()
    successor = Journal.open(tmp_path)
    assert successor.items("a.") == [("a.1", b'{"x":1}')]
    assert successor.get("b.1") == b"3"
    assert successor.get("a.2") is None
    successor.close()


async def test_one_sync_serves_everybody_who_waits(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)

    async def accept(number: int) -> None:
        journal.put(f"a.{number}", b"1")
        await journal.sync()

    await asyncio.gather(*(accept(n) for n in range(200)))
    assert journal.syncs <= 3
    journal.close()


async def test_sync_returns_only_after_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path)
    synced: list[int] = []
    real = os.fdatasync

    def recording(fd: int) -> None:
        real(fd)
        synced.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fdatasync", recording)
    journal.put("a", b"1")
    size = journal.size_bytes
    assert synced == []
    await journal.sync()
    assert synced == [size]
    await journal.sync()  # nothing new: no second one
    assert synced == [size]
    journal.close()


async def test_a_torn_end_is_cut_off_before_more_is_written(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.put("a", b"1")
    journal.close()
    with (tmp_path / "journal").open("ab") as file:
        file.write(encode_line("b", b"2")[:-3])
    again = Journal.open(tmp_path)
    again.put("c", b"3")
    again.close()
    last = Journal.open(tmp_path)
    assert last.items("") == [("a", b"1"), ("c", b"3")]
    assert last.quarantined == 0
    last.close()


async def test_damage_is_set_aside_once_and_the_rest_is_used(tmp_path: Path) -> None:
    bad = b"00000000 a {}\n"
    good = encode_line("b", b"2")
    (tmp_path / "journal").write_bytes(bad + good)
    journal = Journal.open(tmp_path)
    assert journal.items("") == [("b", b"2")]
    assert journal.quarantined == 1
    journal.set_aside("b")
    assert journal.get("b") is None
    journal.close()
    assert (tmp_path / "journal.quarantine").read_bytes() == bad + good
    again = Journal.open(tmp_path)
    assert again.quarantined == 0
    assert again.items("") == []
    again.close()


async def test_a_journal_of_dead_lines_is_rewritten_and_keeps_what_lives(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, compact_bytes=10_000)
    for number in range(300):
        journal.put("hot", b"x" * 100 + str(number).encode())
        journal.put(f"kept.{number % 10}", b"1")
        await journal.sync()
    assert journal.size_bytes < 12_000
    assert (tmp_path / "journal").stat().st_size == journal.size_bytes
    journal.close()
    again = Journal.open(tmp_path)
    assert again.get("hot") == b"x" * 100 + b"299"
    assert len(again.items("kept.")) == 10
    again.close()


async def test_what_is_put_while_the_snapshot_is_written_is_not_lost(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, compact_bytes=2_000)
    for _ in range(100):
        journal.put("hot", b"x" * 100)
    syncing = asyncio.create_task(journal.sync())
    await asyncio.sleep(0)  # the snapshot is under way in its thread
    journal.put("meanwhile", b"1")
    journal.drop("hot")
    await syncing
    await journal.sync()
    journal.close()
    again = Journal.open(tmp_path)
    assert again.items("") == [("meanwhile", b"1")]
    again.close()


async def test_no_room_for_a_snapshot_leaves_the_old_file_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path, compact_bytes=1_000)

    def full(path: Path, entries: dict[str, bytes]) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("services.edge.journal.write_snapshot", full)
    for _ in range(50):
        journal.put("hot", b"x" * 100)
    await journal.sync()
    journal.close()
    monkeypatch.undo()
    again = Journal.open(tmp_path)
    assert again.get("hot") == b"x" * 100
    again.close()


async def test_a_failed_sync_breaks_the_journal_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path)
    journal.put("a", b"1")

    def failing(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", failing)
        with pytest.raises(JournalBrokenError):
            await journal.sync()
    with pytest.raises(JournalBrokenError):
        journal.put("b", b"2")
    with pytest.raises(JournalBrokenError):
        await journal.wait_broken()
    journal.close()


async def test_a_write_that_does_not_fit_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path)
    journal.put("a", b"1")
    real = os.write

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
        with pytest.raises(JournalFullError):
            journal.put("b", b"2")
    journal.put("c", b"3")
    journal.close()
    again = Journal.open(tmp_path)
    assert again.items("") == [("a", b"1"), ("c", b"3")]
    assert again.quarantined == 0
    again.close()
