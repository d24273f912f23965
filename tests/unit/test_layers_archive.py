"""What an archive may contain: each refusal names the member, and memory stays bounded."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from libdsec.errors import InvalidArgument
from libdsec.wire.layer import LayerKind
from services.edge.layers.archive import ArchiveFacts, ArchiveLimits, inspect_archive

Member = tuple[tarfile.TarInfo, bytes]
LIMITS = ArchiveLimits(max_members=50, max_unpacked_bytes=10_000)


def member(name: str, data: bytes = b"", **fields: object) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def directory(name: str) -> Member:
    return member(name, type=tarfile.DIRTYPE)


def link(name: str, target: str) -> Member:
    return member(name, type=tarfile.SYMTYPE, linkname=target)


def hard_link(name: str, target: str) -> Member:
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def device(name: str, major: int, minor: int) -> Member:
    return member(name, type=tarfile.CHRTYPE, devmajor=major, devminor=minor)


def with_xattr(name: str, key: str) -> Member:
    return member(name, pax_headers={f"SCHILY.xattr.{key}": "y"})


@pytest.fixture
def inspect(tmp_path: Path) -> Callable[..., ArchiveFacts]:
    def inspect(*members: Member, kind: LayerKind = LayerKind.TOOLKIT) -> ArchiveFacts:
        archive = tmp_path / "a.tar"
        with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
            for info, data in members:
                tar.addfile(info, io.BytesIO(data))
        return inspect_archive(archive, kind, LIMITS)

    return inspect


def test_counts_members_and_bytes_and_finds_implied_directories(
    inspect: Callable[..., ArchiveFacts],
) -> None:
    facts = inspect(directory("./"), member("./a/b/c", b"12345"), directory("a/b"), link("l", "/x"))
    assert facts == ArchiveFacts(4, 5, frozenset({PurePosixPath("a")}))


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([member("../evil")], "'../evil'.*contains '..'"),
        ([member("a/../../evil")], "contains '..'"),
        ([member("/etc/passwd")], "'/etc/passwd'.*is absolute"),
        ([hard_link("a", "../../etc/shadow")], "target of member 'a'.*contains '..'"),
        ([hard_link("a", "/etc/shadow")], "target of member 'a'.*is absolute"),
        ([link("d", "/etc"), member("d/passwd")], "'d/passwd' lies below 'd'"),
        ([link("d", "."), member("d/x")], "'d/x' lies below 'd'"),
        ([link("d", "/etc"), hard_link("h", "d/shadow")], "lies below 'd'"),
        ([device("sda", 8, 0)], "'sda' is a device node"),
        ([device("wh", 0, 0)], "'wh' is a device node"),
        ([member("blk", type=tarfile.BLKTYPE)], "'blk' is a device node"),
        ([member("odd", type=b"V")], "'odd' is of type b'V'"),
        ([member("n" * 255)], "longer than a file name"),
        ([member("/".join(["d" * 200] * 21))], "longer than a file name"),
        ([link("./", "/etc")], "replace the layer's root"),
        ([with_xattr("o", "trusted.overlay.opaque")], "trusted.overlay.opaque"),
        ([member("x", pax_headers={"LIBARCHIVE.xattr.user.a": "eQ=="})], "LIBARCHIVE"),
        ([member(f"m{n}") for n in range(51)], "more than 50 members"),
        ([member("big", b"x" * 6000), member("more", b"x" * 6000)], "10000 bytes.*'more'"),
    ],
)  # fmt: skip
def test_refuses_by_member(
    inspect: Callable[..., ArchiveFacts], members: list[Member], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        inspect(*members)


def test_a_diff_may_take_away_from_the_layers_below(
    inspect: Callable[..., ArchiveFacts],
) -> None:
    removals = [device("gone", 0, 0), with_xattr("d", "trusted.overlay.opaque")]
    assert inspect(*removals, kind=LayerKind.DIFF).members == 2
    with pytest.raises(InvalidArgument, match="device node"):
        inspect(device("null", 1, 3), kind=LayerKind.DIFF)


def test_of_duplicates_the_last_counts(inspect: Callable[..., ArchiveFacts]) -> None:
    facts = inspect(link("d", "/etc"), directory("d"), member("d/passwd"))
    assert facts.members == 3


def test_a_sparse_file_counts_with_its_holes(tmp_path: Path) -> None:
    archive = tmp_path / "sparse.tar"
    headers = {"GNU.sparse.size": "20000", "GNU.sparse.map": "0,1", "GNU.sparse.numblocks": "1"}
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        info, data = member("holes", b"x", pax_headers=headers)
        tar.addfile(info, io.BytesIO(data))
    with pytest.raises(InvalidArgument, match="10000 bytes"):
        inspect_archive(archive, LayerKind.BASE, LIMITS)


@pytest.mark.parametrize("content", [b"", b"not a tar at all" * 100, b"\0" * 10240])
def test_what_is_no_archive_is_refused_or_empty(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "a.tar"
    archive.write_bytes(content)
    if content.strip(b"\0") or not content:
        with pytest.raises(InvalidArgument, match="not a usable tar"):
            inspect_archive(archive, LayerKind.BASE, LIMITS)
    else:
        assert inspect_archive(archive, LayerKind.BASE, LIMITS).members == 0


def test_a_truncated_archive_is_refused_with_the_last_member_seen(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("first", "second"):
            info, data = member(name, b"x" * 5000)
            tar.addfile(info, io.BytesIO(data))
    end_of_first = 512 + 5120
    archive.write_bytes(archive.read_bytes()[: end_of_first + 512 + 1000])
    with pytest.raises(InvalidArgument, match=r"unexpected end of data.*member 'second'"):
        inspect_archive(archive, LayerKind.BASE, LIMITS)


def test_a_header_that_claims_to_be_huge_is_not_read_into_memory(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, 1 << 30
    with archive.open("wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT))
        file.truncate(1 << 30)
    with pytest.raises(InvalidArgument, match="header bytes"):
        inspect_archive(archive, LayerKind.BASE, LIMITS)


def test_an_endless_chain_of_headers_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 0
    archive = tmp_path / "a.tar"
    archive.write_bytes(header.tobuf(tarfile.USTAR_FORMAT) * 3000)
    with pytest.raises(InvalidArgument, match=r"not a usable tar|header bytes"):
        inspect_archive(archive, LayerKind.BASE, LIMITS)
