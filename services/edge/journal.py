"""The edge's memory on disk: a map of keys to JSON texts that survives `kill -9` and a torn write.

Invariants:

* What was put before `sync()` returned is on disk (fdatasync), also after a power cut. What was put
  without a sync survives the process, not the machine.
* One fdatasync serves everybody who waits (group commit).
* A torn last line is forgotten: nobody was told it was there. A damaged line anywhere else is moved
  to `journal.quarantine` and the rest is used: one bad record never keeps a node from starting.
* The file is rewritten (snapshot, rename) when most of it is dead lines.
* After a failed fdatasync nothing may be believed any more (the kernel has dropped the dirty
  pages): every later call raises JournalBrokenError and the process should end.

It knows nothing of what the values mean; `journal_file` knows what a line looks like.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from libhost.aio import HostThreads

from .journal_file import Loaded, encode_line, load, quarantine, sync_directory, write_snapshot

COMPACT_BYTES: Final = 4 << 20
_SYNC_TIMEOUT_S: Final = 30.0


class JournalBrokenError(Exception):
    """The journal's file can no longer be trusted; the edge has to restart and read it again."""


class JournalFullError(Exception):
    """The journal's file system took no more; nothing of the record was kept."""


class Journal:
    """open -> put, drop, sync (any number) -> close."""

    def __init__(self, path: Path, loaded: Loaded, fd: int, compact_bytes: int) -> None:
        self._path = path
        self._entries = loaded.entries
        self._fd = fd
        self._size = loaded.sound_bytes
        self._live_bytes = sum(map(_cost, self._entries.items()))
        self._compact_at = compact_bytes
        self._compact_bytes = compact_bytes
        self._written = 0  # lines, of which the first `_durable` are on disk
        self._durable = 0
        self._one_sync = asyncio.Lock()
        self._thread = HostThreads(1)  # its own: a sync never queues behind sandboxes that start
        self._missed: list[bytes] | None = None  # by the snapshot that is being written
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.damaged = loaded.damaged
        self.quarantined = len(loaded.damaged)
        self.syncs = 0

    @classmethod
    def open(cls, directory: Path, *, compact_bytes: int = COMPACT_BYTES) -> Self:
        """Read and repair; OSError if the directory cannot be used."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / "journal"
        loaded = load(path.read_bytes() if path.exists() else b"")
        if loaded.damaged:
            quarantine(path, loaded.damaged)
        if loaded.damaged or loaded.torn:
            os.close(write_snapshot(path, loaded.entries))
            path.with_suffix(".new").rename(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        sync_directory(path)
        loaded.sound_bytes = os.fstat(fd).st_size
        return cls(path, loaded, fd, compact_bytes)

    def items(self, prefix: str) -> list[tuple[str, bytes]]:
        """The entries whose keys begin with `prefix`, as they are now."""
        return [(k, v) for k, v in self._entries.items() if k.startswith(prefix)]

    def get(self, key: str) -> bytes | None:
        return self._entries.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Set an entry. The process's end cannot undo it; a power cut may, until `sync`."""
        self._append(encode_line(key, value))
        self._uncount(key)
        self._entries[key] = value
        self._live_bytes += _cost((key, value))

    def drop(self, key: str) -> None:
        """Remove an entry; nothing happens if there is none."""
        if key in self._entries:
            self._append(encode_line(key, None))
            self._uncount(key)
            del self._entries[key]

    def set_aside(self, key: str) -> None:
        """Move an entry that its reader cannot understand to the quarantine."""
        quarantine(self._path, (encode_line(key, self._entries[key]).rstrip(),))
        self.quarantined += 1
        self.drop(key)

    async def sync(self) -> None:
        """Returns when everything put before is on disk."""
        target = self._written
        async with self._one_sync:
            if self._durable >= target:
                return
            if self._size > self._compact_at and self._size > 2 * self._live_bytes:
                await self._compact()
            mark = self._written
            await self._in_thread(os.fdatasync, self._fd)
            self._durable = mark
            self.syncs += 1

    async def wait_broken(self) -> None:
        """Raises JournalBrokenError once the disk has failed; waits for ever otherwise."""
        await asyncio.shield(self._broken)

    def close(self) -> None:
        self._thread.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._broken.cancel()

    @property
    def size_bytes(self) -> int:
        return self._size

    def _uncount(self, key: str) -> None:
        if key in self._entries:
            self._live_bytes -= _cost((key, self._entries[key]))

    def _append(self, line: bytes) -> None:
        if self._broken.done():
            raise JournalBrokenError(f"{self._path} failed before")
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError("short write")
        except OSError as err:
            os.ftruncate(self._fd, self._size)
            raise JournalFullError(f"{self._path}: {err}") from err
        self._size += len(line)
        self._written += 1
        if self._missed is not None:
            self._missed.append(line)

    async def _in_thread(self, step: Callable[..., None], *args: object) -> None:
        """A step of a sync; if it fails the journal is broken for good."""
        if self._broken.done():
            raise JournalBrokenError(f"{self._path} failed before")
        try:
            await self._thread.run(_SYNC_TIMEOUT_S, step, *args)
        except (OSError, TimeoutError) as err:
            broken = JournalBrokenError(f"{self._path}: {err}")
            if not self._broken.done():
                self._broken.set_exception(broken)
                self._broken.exception()  # looked at: no warning if nobody waits for it
            raise broken from err

    async def _compact(self) -> None:
        """Put a snapshot in the file's place. Runs under the sync lock, so that nothing can be
        acknowledged between the snapshot, which is synced, and the sync that follows the rename.
        Without room for it the old file goes on being used."""
        self._missed = []
        entries = dict(self._entries)
        try:
            fd = await self._thread.run(_SYNC_TIMEOUT_S, write_snapshot, self._path, entries)
            size = os.fstat(fd).st_size + os.write(fd, b"".join(self._missed))
            self._path.with_suffix(".new").rename(self._path)
        except OSError:
            self._compact_at = 2 * self._size
            return
        finally:
            self._missed = None
        os.close(self._fd)
        self._fd, self._size = fd, size
        self._compact_at = self._compact_bytes
        await self._in_thread(sync_directory, self._path)


def _cost(entry: tuple[str, bytes]) -> int:
    return len(entry[0]) + len(entry[1]) + 11
