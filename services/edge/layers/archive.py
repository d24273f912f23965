"""What a tar archive may contain to become a layer, decided before anything is unpacked.

Reads headers only, in bounded memory, and refuses by member name: what would reach outside the
layer, what the kernel could not store, what would act on other layers. Unpacking is another
program's work (`build`), which has defences of its own; this is where a caller gets a clear answer.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from libdsec.errors import InvalidArgument
from libdsec.wire.layer import LayerKind

_HEADER_BYTES = 1 << 20  # of one member: names, extended attributes, map of holes
_GLOBAL_KEYS = 1000
_NAME_BYTES = 254  # mkfs.erofs 1.5 cuts a name of 255 bytes short, and may then store a wrong file
_PATH_BYTES = 4095
_XATTR = "SCHILY.xattr."
_XATTR_OTHER = "LIBARCHIVE.xattr."
_OVERLAY_XATTRS = ("trusted.overlay.", "user.overlay.")
_PLAIN_TYPES = frozenset(
    {
        tarfile.REGTYPE,
        tarfile.AREGTYPE,
        tarfile.CONTTYPE,
        tarfile.GNUTYPE_SPARSE,
        tarfile.DIRTYPE,
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.FIFOTYPE,
    }
)


@dataclass(frozen=True)
class ArchiveLimits:
    """Of one layer, unpacked. Holes count: an image stores them as zeros."""

    max_members: int = 2_000_000
    max_unpacked_bytes: int = 64 << 30


@dataclass(frozen=True)
class ArchiveFacts:
    """`implied` directories have no member of their own, so the archive gives them no mode."""

    members: int
    unpacked_bytes: int
    implied: frozenset[PurePosixPath]


def inspect_archive(archive: Path, kind: LayerKind, limits: ArchiveLimits) -> ArchiveFacts:
    """Look at every member of an uncompressed tar.

    Raises:
        InvalidArgument: it is no tar, is cut short, exceeds a limit, or has a member that is not
            allowed; the message names the member.
    """
    inspection = _Inspection(kind, limits)
    with archive.open("rb") as file:
        headers = _Headers(file)
        try:
            with tarfile.open(fileobj=headers, mode="r:") as tar:  # type: ignore[call-overload]
                while (member := tar.next()) is not None:
                    inspection.admit(member)
                    tar.members.clear()  # it keeps every member it has seen
                    if len(tar.pax_headers) > _GLOBAL_KEYS:
                        raise InvalidArgument(f"more than {_GLOBAL_KEYS} global archive headers")
                    headers.next_member()
        except (tarfile.TarError, RecursionError, ValueError, OverflowError) as err:
            raise InvalidArgument(
                f"not a usable tar archive: {err} (after {inspection.last})",
                hint="archives are plain tar, or tar in gzip or bzip2",
            ) from err
    return inspection.facts()


class _Headers:
    """The archive's file, for header reads only: a header that claims to be huge is not read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._budget = _HEADER_BYTES
        self.seek = file.seek
        self.tell = file.tell

    def next_member(self) -> None:
        self._budget = _HEADER_BYTES

    def read(self, size: int) -> bytes:
        self._budget -= size
        if self._budget < 0:
            raise InvalidArgument(f"an archive member has more than {_HEADER_BYTES} header bytes")
        return self._file.read(size)


class _Inspection:
    """What the members seen so far amount to."""

    def __init__(self, kind: LayerKind, limits: ArchiveLimits) -> None:
        self._kind = kind
        self._limits = limits
        self._members = 0
        self._bytes = 0
        self._links: set[PurePosixPath] = set()
        self._stated: set[PurePosixPath] = set()
        self._needed: set[PurePosixPath] = {PurePosixPath()}
        self.last = "the start"

    def facts(self) -> ArchiveFacts:
        return ArchiveFacts(self._members, self._bytes, frozenset(self._needed - self._stated))

    def admit(self, member: tarfile.TarInfo) -> None:
        self.last = f"member {member.name!r}"
        self._count(member)
        path = _inner_path(member.name, self.last)
        if not path.parts and not member.isdir():
            raise InvalidArgument(f"{self.last} would replace the layer's root")
        self._check_parents(path)
        self._check_type(member)
        self._check_xattrs(member)
        if member.islnk():
            self._check_parents(_inner_path(member.linkname, f"the target of {self.last}"))
        self._links.discard(path)  # of duplicates the last counts
        self._stated.discard(path)
        if member.issym():
            self._links.add(path)
        elif member.isdir():
            self._stated.add(path)

    def _count(self, member: tarfile.TarInfo) -> None:
        self._members += 1
        self._bytes += member.size
        if self._members > self._limits.max_members:
            raise InvalidArgument(f"more than {self._limits.max_members} members in the archive")
        if self._bytes > self._limits.max_unpacked_bytes:
            raise InvalidArgument(
                f"the archive unpacks to more than {self._limits.max_unpacked_bytes} bytes "
                f"(reached at {self.last})"
            )

    def _check_parents(self, path: PurePosixPath) -> None:
        for parent in path.parents:
            if parent in self._links:
                raise InvalidArgument(
                    f"{self.last} lies below {str(parent)!r}, which is a symbolic link here",
                    hint="archive the files under the directory that the link points to",
                )
            self._needed.add(parent)

    def _check_type(self, member: tarfile.TarInfo) -> None:
        if member.type in _PLAIN_TYPES:
            return
        whiteout = member.ischr() and (member.devmajor, member.devminor) == (0, 0)
        if whiteout and self._kind is LayerKind.DIFF:
            return
        what = "a device node" if member.isdev() else f"of type {member.type!r}"
        raise InvalidArgument(
            f"{self.last} is {what}, which a {self._kind} layer cannot hold",
            hint="a sandbox gets its device nodes when it starts: leave dev/* out of the archive",
        )

    def _check_xattrs(self, member: tarfile.TarInfo) -> None:
        for key in member.pax_headers:
            if key.startswith(_XATTR_OTHER):
                if _XATTR + key.removeprefix(_XATTR_OTHER) not in member.pax_headers:
                    raise InvalidArgument(f"{self.last} states {key} only, not {_XATTR}*")
            elif key.startswith(_XATTR) and self._kind is not LayerKind.DIFF:
                name = key.removeprefix(_XATTR)
                if name.startswith(_OVERLAY_XATTRS):
                    raise InvalidArgument(
                        f"{self.last} has the attribute {name}, which would act on other layers",
                        hint="a layer that takes away from those below it is of kind diff",
                    )


def _inner_path(name: str, what: str) -> PurePosixPath:
    """The path below the layer's root, without `.` components."""
    path = PurePosixPath(name)
    said = f"{what[:300]} has the path {name[:200]!r}, which"
    if path.is_absolute():
        raise InvalidArgument(f"{said} is absolute", hint="archive with -C DIR .")
    if ".." in path.parts:
        raise InvalidArgument(f"{said} contains '..'")
    raw = str(path).encode(errors="surrogateescape")
    if b"\0" in raw:
        raise InvalidArgument(f"{said} contains a zero byte")
    if len(raw) > _PATH_BYTES or any(len(part) > _NAME_BYTES for part in raw.split(b"/")):
        raise InvalidArgument(f"{said} is longer than a file name may be")
    return path
