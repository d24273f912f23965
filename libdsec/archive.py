"""A layer's source as a stream of bytes: a directory packed on the fly, or an archive as it is.

Memory stays bounded whatever the size: a directory is packed by a thread into a pipe, which holds
the thread back until its other end is read.
"""

from __future__ import annotations

import asyncio
import bz2
import gzip
import lzma
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from io import BufferedIOBase
from pathlib import Path

from .errors import InvalidArgument

Owner = tuple[int, int]
Read = Callable[[int], bytes]  # up to that many bytes; fewer only at the end

_COMPRESSED: tuple[tuple[bytes, Callable[[Path], BufferedIOBase]], ...] = (
    (b"\x1f\x8b", gzip.GzipFile),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\0", lzma.LZMAFile),
)


@asynccontextmanager
async def opened(source: Path, owner: Owner | None) -> AsyncIterator[Read]:
    """Read `source` as one uncompressed tar archive.

    Args:
        owner: uid and gid of everything packed from a directory; None keeps what is on disk.

    Raises:
        InvalidArgument: there is nothing at `source`, or it can be no layer.
    """
    if source.is_dir():
        async with _packed(source, owner) as read:
            yield read
        return
    with await asyncio.to_thread(_open_archive, source) as archive:
        yield archive.read


def archive_size(source: Path) -> int | None:
    """How much there is to read, where that is known beforehand."""
    if source.is_dir() or _compression(source) is not None:
        return None
    return source.stat().st_size


def _open_archive(source: Path) -> BufferedIOBase:
    try:
        decompress = _compression(source)
        return decompress(source) if decompress else source.open("rb")
    except OSError as err:
        raise InvalidArgument(f"{source} cannot be read: {err.strerror}") from err


def _compression(source: Path) -> Callable[[Path], BufferedIOBase] | None:
    with source.open("rb") as file:
        head = file.read(8)
    return next((open_ for magic, open_ in _COMPRESSED if head.startswith(magic)), None)


@asynccontextmanager
async def _packed(source: Path, owner: Owner | None) -> AsyncIterator[Read]:
    read_end, write_end = os.pipe()
    packing = asyncio.get_running_loop().run_in_executor(None, _pack, source, owner, write_end)
    reader = os.fdopen(read_end, "rb")
    try:
        yield reader.read
        # What was read is the whole only if the packing says so.
        await packing
    finally:
        reader.close()  # a thread still writing gets EPIPE
        with suppress(OSError, InvalidArgument):
            await packing


def _pack(source: Path, owner: Owner | None, write_end: int) -> None:
    def normalise(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        if owner is not None:
            entry.uid, entry.gid = owner
            entry.uname = entry.gname = ""
        return entry

    with (
        os.fdopen(write_end, "wb") as pipe,
        tarfile.open(fileobj=pipe, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        _add(archive, source, ".", normalise)


def _add(
    archive: tarfile.TarFile,
    path: Path,
    name: str,
    normalise: Callable[[tarfile.TarInfo], tarfile.TarInfo],
) -> None:
    """Add a tree in the order of its names, so that the same tree is the same archive."""
    if stat.S_ISSOCK(path.lstat().st_mode):
        raise InvalidArgument(f"{path} is a socket", hint="leave it out of the layer")
    archive.add(path, name, recursive=False, filter=normalise)
    if path.is_dir() and not path.is_symlink():
        for child in sorted(path.iterdir()):
            _add(archive, child, f"{name}/{child.name}", normalise)
