"""What the journal's file looks like: one entry per line, each with its own checksum.

    <crc32 of the rest, 8 hex> <key> [<value>]\\n

A value is JSON, so it holds no newline and a reader finds the next entry behind any damage. The
last line of a key counts; a line without a value deletes it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Loaded:
    """What reading a file gave; the first `sound_bytes` bytes are whole lines."""

    entries: dict[str, bytes]
    damaged: tuple[bytes, ...]
    sound_bytes: int
    torn: bool


def encode_line(key: str, value: bytes | None) -> bytes:
    body = key.encode() if value is None else b"%s %s" % (key.encode(), value)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def load(data: bytes) -> Loaded:
    """Read a file in whatever state it is."""
    entries: dict[str, bytes] = {}
    damaged: list[bytes] = []
    sound = data.rfind(b"\n") + 1
    for line in data[:sound].split(b"\n")[:-1]:
        crc, _, body = line.partition(b" ")
        if not body or crc != b"%08x" % zlib.crc32(body):
            damaged.append(line)
            continue
        key, has_value, value = body.partition(b" ")
        if has_value:
            entries[key.decode()] = value
        else:
            entries.pop(key.decode(), None)
    return Loaded(entries, tuple(damaged), sound, torn=sound != len(data))


def write_snapshot(path: Path, entries: Mapping[str, bytes]) -> int:
    """Write the entries to `<path>.new`, synced; returns its descriptor, open for appending."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    fd = os.open(path.with_suffix(".new"), flags, 0o600)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.writelines(encode_line(key, value) for key, value in entries.items())
        os.fdatasync(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def quarantine(path: Path, lines: Iterable[bytes]) -> None:
    """Keep what could not be read, for whoever is on call."""
    with path.with_suffix(".quarantine").open("ab") as file:
        file.writelines(line + b"\n" for line in lines)


def sync_directory(path: Path) -> None:
    """Make a rename or creation of `path` durable."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
