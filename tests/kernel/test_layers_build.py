"""From an archive to a mounted image: what comes out is what went in, and nothing else."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import os
import random
import shutil
import struct
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libdsec.errors import InvalidArgument, QuotaExceeded
from libdsec.wire.layer import LayerKind
from libhost import syscall
from libhost.command import CommandFailedError
from libhost.erofs import check_image, mount_image
from services.chassis.clock import Clock
from services.edge.layers.archive import ArchiveLimits
from services.edge.layers.build import BuildLimits, BuiltImage, build_layer
from services.edge.layers.store import DamagedImageError, DirectoryStore

from .layer_tree import Node, Tree, read_tree, write_archive

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="device nodes, owners and mounts need root"),
    pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed"),
]

CAPABILITY = struct.pack("<IIIII", 0x0200_0001, 1 << 10, 0, 0, 0)  # cap_net_bind_service+ep
ROOT = Node("d", 0o755)
AWKWARD: Tree = {
    ".": Node("d", 0o751, 7, 8, 10**9 + 1),
    "bin": Node("d", 0o755),
    "bin/su": Node("-", 0o4755, data=b"\x7fELF", mtime_ns=1_234_567_890_123_456_789),
    "bin/wall": Node("-", 0o2755, 0, 5, data=b"x"),
    "bin/ping": Node("-", 0o755, data=b"p", xattrs=(("security.capability", CAPABILITY),)),
    "big-owner": Node("-", 0o600, 5_000_000, 4_000_000_000, data=b"o"),
    "tmp": Node("d", 0o1777),
    "empty": Node("d", 0o700, mtime_ns=999_999_999),
    "empty-file": Node("-", 0o000),
    "absolute": Node("l", 0o777, target="/etc/passwd"),
    "dangling": Node("l", 0o777, target="../../nowhere/../x"),
    "fifo": Node("p", 0o640),
    "n" * 254: Node("-", data=b"long name"),
    "deep/" + "/".join(["d" * 100] * 35): Node("d", 0o755),
    "odd \n\t\\ name \x01": Node("-", data=b"odd"),
    "grüße-\u4e2d": Node("-", data=b"utf-8"),
    ".wh.hidden": Node("-", data=b"only a name here"),
    ".wh..wh..opq": Node("-"),
    "attributes": Node(
        "-",
        data=b"a",
        xattrs=(("trusted.t", b"\0\xff"), ("user.empty", b""), ("user.long", b"v" * 2000)),
    ),
    "hard-1": Node("-", 0o640, 1, 2, 3, b"same", links=frozenset({"hard-1", "hard-2", "bin/h"})),
    "hard-2": Node("-", 0o640, 1, 2, 3, b"same", links=frozenset({"hard-1", "hard-2", "bin/h"})),
    "bin/h": Node("-", 0o640, 1, 2, 3, b"same", links=frozenset({"hard-1", "hard-2", "bin/h"})),
    "sparse": Node("-", data=bytes(3 << 20) + b"end"),
    "random": Node("-", data=random.Random(1).randbytes(300_000)),
}


def with_parents(tree: Tree) -> Tree:
    """What the tree becomes: directories that nothing describes are root's, 0755, of 1970."""
    whole = dict(tree)
    for name in tree:
        for parent in Path(name).parents:
            whole.setdefault(str(parent), ROOT)
    return whole


@contextlib.contextmanager
def mounted(image: Path) -> Iterator[Path]:
    """A detached mount, reached through its descriptor: it is gone with it."""
    fd = mount_image(image)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def build(archive: Path, work: Path, kind: LayerKind = LayerKind.BASE) -> BuiltImage:
    work.mkdir()
    return build_layer(archive, work, kind, BuildLimits())


def test_awkward_members_come_out_as_they_went_in(tmp_path: Path) -> None:
    archive = write_archive(AWKWARD, tmp_path / "a.tar")
    built = build(archive, tmp_path / "work")
    expected = with_parents(AWKWARD)
    with mounted(built.path) as root:
        found = read_tree(root)
    assert found == expected
    assert built.files == len(expected) - 1


def test_whiteouts_of_a_diff_are_kept_as_the_overlay_reads_them(tmp_path: Path) -> None:
    tree: Tree = {
        "gone": Node("c", 0o000),
        "opaque": Node("d", 0o755, xattrs=(("trusted.overlay.opaque", b"y"),)),
    }
    built = build(write_archive(tree, tmp_path / "a.tar"), tmp_path / "work", LayerKind.DIFF)
    with mounted(built.path) as root:
        assert read_tree(root) == with_parents(tree)
        assert (root / "gone").lstat().st_rdev == 0


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40)
PLAIN = NAMES.filter(lambda n: n not in (".", "..") and len(n.encode()) <= 254)
XATTRS = st.dictionaries(
    st.sampled_from(("user.a", "user.b", "trusted.c")), st.binary(max_size=60), max_size=2
)
OWNER = st.integers(0, 2**32 - 2)
NODES = st.builds(
    lambda kind, mode, uid, gid, mtime, data, xattrs: Node(
        kind,
        0o777 if kind == "l" else mode,
        uid,
        gid,
        mtime,
        data if kind == "-" else b"",
        "t/../x" if kind == "l" else "",
        tuple(sorted(xattrs.items())) if kind in "-d" else (),
    ),
    st.sampled_from("--dlp"),
    st.integers(0, 0o7777),
    OWNER,
    OWNER,
    st.integers(0, 4_000_000_000 * 10**9),
    st.binary(max_size=9000),
    XATTRS,
)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tree: Tree = {}
    directories = [""]
    for name, node in draw(st.dictionaries(PLAIN, NODES, max_size=12)).items():
        path = f"{draw(st.sampled_from(directories))}{name}"
        tree[path] = node
        if node.kind == "d":
            directories.append(f"{path}/")
    return tree


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tree=trees(), seed=st.integers(0, 99))
def test_any_tree_round_trips_and_its_digest_does_not_depend_on_the_order(
    tmp_path: Path, tree: Tree, seed: int
) -> None:
    directory = Path(tempfile.mkdtemp(dir=tmp_path))
    order = sorted(tree)
    random.Random(seed).shuffle(order)
    one = build(write_archive(tree, directory / "one.tar"), directory / "one")
    other = build(write_archive(tree, directory / "other.tar", order=order), directory / "other")
    assert one.path.read_bytes() == other.path.read_bytes()
    with mounted(one.path) as root:
        assert read_tree(root) == with_parents({".": ROOT, **tree})


def test_the_same_archive_compressed_is_the_same_image(tmp_path: Path) -> None:
    plain = write_archive(AWKWARD, tmp_path / "a.tar")
    images = {build(plain, tmp_path / "plain").path.read_bytes()}
    for name, compress in (("gz", gzip.compress), ("bz2", bz2.compress)):
        archive = tmp_path / f"a.{name}"
        archive.write_bytes(compress(plain.read_bytes()))
        images.add(build(archive, tmp_path / name).path.read_bytes())
    assert len(images) == 1


def test_a_bomb_is_stopped_where_it_exceeds_the_limit(tmp_path: Path) -> None:
    archive = tmp_path / "bomb.tgz"
    with gzip.open(archive, "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    work = tmp_path / "work"
    work.mkdir()
    limits = BuildLimits(ArchiveLimits(max_unpacked_bytes=1 << 20))
    with pytest.raises(InvalidArgument, match="unpacks to more than 1048576"):
        build_layer(archive, work, LayerKind.BASE, limits)
    assert (work / "archive.tar").stat().st_size <= 3 << 20


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x28\xb5\x2f\xfd" + bytes(100), "compressed with zstd"),
        (gzip.compress(bytes(10240))[:-20], "compression is damaged"),
        (b"\x1f\x8b" + bytes(100), "compression is damaged"),
        (b"no archive" * 200, "not a usable tar"),
    ],
)
def test_a_bad_archive_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    archive = tmp_path / "bad"
    archive.write_bytes(content)
    with pytest.raises(InvalidArgument, match=said):
        build(archive, tmp_path / "work")


def hostile(path: Path, *members: tuple[str, bytes, str]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info, io.BytesIO())
    return path


def test_nothing_is_written_outside_the_layer(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    attempts = (
        [("../outside/a", tarfile.REGTYPE, "")],
        [("l", tarfile.SYMTYPE, str(outside)), ("l/a", tarfile.REGTYPE, "")],
        [("l", tarfile.SYMTYPE, "../../outside"), ("h", tarfile.LNKTYPE, "l/../l"),
         ("h/a", tarfile.REGTYPE, "")],
        [(f"{outside}/a", tarfile.REGTYPE, "")],
    )  # fmt: skip
    for number, members in enumerate(attempts):
        with pytest.raises(InvalidArgument):
            build(hostile(tmp_path / f"{number}.tar", *members), tmp_path / f"w{number}")
    assert not list(outside.iterdir())


def test_a_hard_link_to_nothing_is_refused_with_its_name(tmp_path: Path) -> None:
    archive = hostile(tmp_path / "a.tar", ("h", tarfile.LNKTYPE, "missing"))
    with pytest.raises(InvalidArgument, match=r"could not be unpacked.*missing"):
        build(archive, tmp_path / "work")


def test_a_damaged_image_is_found_by_fsck_and_by_its_digest(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store", Clock())
    built = build(write_archive(AWKWARD, tmp_path / "a.tar"), tmp_path / "work")
    stored = store.put(built.path)
    image = store.path(stored.digest)
    image.chmod(0o644)
    with image.open("r+b") as file:
        file.seek(1024 + 128)  # behind the superblock: inodes
        file.write(b"\xff" * 2048)
    with pytest.raises(DamagedImageError):
        store.verify(stored.digest, stored.size_bytes)
    with pytest.raises(CommandFailedError):
        check_image(image)
    with pytest.raises(OSError, match=str(image)):
        mount_image(image)


@pytest.mark.parametrize("size", ["2m", "5m"], ids=["unpacking", "making the image"])
def test_a_full_disk_is_said_and_makes_no_image(tmp_path: Path, size: str) -> None:
    archive = write_archive({"big": Node("-", data=os.urandom(3 << 20))}, tmp_path / "a.tar")
    work = tmp_path / "work"
    work.mkdir()
    syscall.mount("dsec-small", str(work), "tmpfs", 0, f"size={size}")
    try:
        with pytest.raises(QuotaExceeded, match="no disk space left"):
            build_layer(archive, work, LayerKind.BASE, BuildLimits())
        assert not (work / "image.erofs").exists()
    finally:
        syscall.umount2(str(work))
