"""From an archive to a checked image: the same archive always gives the same bytes.

    [gzip | bzip2] -> tar -> inspect -> GNU tar unpacks -> mkfs.erofs -> fsck.erofs

GNU tar unpacks because it knows what a tar can hold (owners by number, nanoseconds, holes, hard
links, extended attributes, capabilities, ACLs) and because it makes a link that points outside its
directory only after everything else is in place. Whatever it has to say means that something was
not restored as archived, so a message fails the build even where its exit code is 0.
"""

from __future__ import annotations

import bz2
import gzip
import os
import stat
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from libdsec.errors import DSecError, Internal, InvalidArgument
from libdsec.wire.layer import LayerKind
from libhost import command
from libhost.erofs import build_image, check_image

from .archive import ArchiveFacts, ArchiveLimits, inspect_archive
from .failure import disk_failure, no_space

_COPY_BYTES = 1 << 20
_IMPLIED_MODE = 0o755
_COMPRESSED: dict[bytes, type[gzip.GzipFile | bz2.BZ2File]] = {
    b"\x1f\x8b": gzip.GzipFile,
    b"BZh": bz2.BZ2File,
}
# What tar and mkfs.erofs say on a full disk.
_FULL = ("No space left on device", "Disk quota exceeded", "Wrote only", "[Error 28]")
_REFUSED = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz"}


@dataclass(frozen=True)
class BuildLimits:
    archive: ArchiveLimits = field(default_factory=ArchiveLimits)
    step_timeout_s: float = 1800.0


@dataclass(frozen=True)
class BuiltImage:
    """An image that has passed fsck; `path` is in the work directory."""

    path: Path
    files: int


def build_layer(archive: Path, work: Path, kind: LayerKind, limits: BuildLimits) -> BuiltImage:
    """Build in `work`, a private directory on the file system the image will stay on. Blocking.

    Raises:
        InvalidArgument: the archive is not acceptable; the message names the member.
        QuotaExceeded: the disk is full.
        DeadlineExceeded: a step took longer than it may.
        Internal: a tool failed on an archive that was acceptable.
    """
    try:
        plain = _plain_tar(archive, work / "archive.tar", limits.archive.max_unpacked_bytes)
        facts = inspect_archive(plain, kind, limits.archive)
        tree = work / "tree"
        tree.mkdir(mode=_IMPLIED_MODE)
        _unpack(plain, tree, limits.step_timeout_s)
        _settle_implied(tree, facts)
        files = _count(tree, limits.archive)
        image = work / "image.erofs"
        build_image(tree, image, timeout_s=limits.step_timeout_s)
        check_image(image, timeout_s=limits.step_timeout_s)
    except command.CommandFailedError as err:
        raise _tool_failure(err) from err
    except OSError as err:
        raise disk_failure(err) from err
    return BuiltImage(image, files)


def _plain_tar(archive: Path, target: Path, max_bytes: int) -> Path:
    """The archive itself, or what it decompresses to."""
    with archive.open("rb") as file:
        head = file.read(8)
    for magic, name in _REFUSED.items():
        if head.startswith(magic):
            raise InvalidArgument(
                f"the archive is compressed with {name}", hint="send plain tar, gzip or bzip2"
            )
    reader = next((cls for magic, cls in _COMPRESSED.items() if head.startswith(magic)), None)
    if reader is None:
        return archive
    # Headers and padding come on top of what the members amount to.
    room = 2 * max_bytes
    try:
        with reader(archive) as source, target.open("wb") as sink:
            while block := source.read(_COPY_BYTES):
                room -= len(block)
                if room < 0:
                    raise InvalidArgument(f"the archive unpacks to more than {max_bytes} bytes")
                sink.write(block)
    except (EOFError, OSError, zlib.error) as err:
        if isinstance(err, OSError) and err.errno is not None:
            raise  # the disk's, not the archive's
        raise InvalidArgument(f"the archive's compression is damaged: {err}") from err
    return target


def _unpack(archive: Path, tree: Path, timeout_s: float) -> None:
    argv = [
        "tar", "--extract", "--file", str(archive), "--directory", str(tree),
        "--numeric-owner", "--same-owner", "--same-permissions", "--delay-directory-restore",
        "--xattrs", "--xattrs-include=*", "--acls", "--warning=no-timestamp",
        "--warning=no-unknown-keyword",
    ]  # fmt: skip
    completed = command.run(argv, timeout_s=timeout_s)
    if completed.stderr:
        raise command.CommandFailedError(completed)


def _settle_implied(tree: Path, facts: ArchiveFacts) -> None:
    """Directories without a member get a fixed mode and time, not those of this moment."""
    for directory in facts.implied:
        path = tree / directory
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise InvalidArgument(f"{str(directory)!r} is a directory and something else at once")
        path.chmod(_IMPLIED_MODE)
        os.utime(path, ns=(0, 0))


def _count(tree: Path, limits: ArchiveLimits) -> int:
    """What was really unpacked, held against the limits again: another program did it."""
    files = size = 0
    for directory, names, others in os.walk(tree):
        files += len(names) + len(others)
        size += sum((Path(directory) / name).lstat().st_size for name in others)
        if files > limits.max_members or size > limits.max_unpacked_bytes:
            raise InvalidArgument("the archive unpacks to more than its headers say")
    return files


def _tool_failure(err: command.CommandFailedError) -> DSecError:
    said = err.completed.stderr.decode(errors="replace").strip()
    first = said.splitlines()[0][:500] if said else f"exit code {err.completed.exit_code}"
    if any(sign in said for sign in _FULL):
        return no_space()
    if err.completed.argv[0] == "tar":
        return InvalidArgument(f"the archive could not be unpacked: {first}")
    return Internal(f"{err.completed.argv[0]} failed on the layer: {first}")
