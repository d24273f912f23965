"""File operations in a crun container: exact, atomic, as the user, never out of the sandbox."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.edge.agent import AgentChannel, AgentStartError, ExecSpec, FileKind, Stage
from tests.kernel.aether_sandbox import AgentSandbox, container, require_binary

pytestmark = pytest.mark.kernel
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentSandbox]:
    require_binary()
    with container(tmp_path_factory.mktemp("a")) as started:
        yield started


@pytest.fixture
async def channel(sandbox: AgentSandbox) -> AsyncIterator[AgentChannel]:
    opened = await AgentChannel.connect(sandbox.socket)
    yield opened
    await opened.aclose()


@pytest.fixture
def outside(sandbox: AgentSandbox) -> Path:
    """A directory of the test's own in the sandbox, and beside it a file of the host."""
    path = sandbox.root / "tmp" / f"f{next(_ids)}"
    path.mkdir()
    path.chmod(0o777)
    (sandbox.root.parent / "host-secret").write_text("secret")
    return path


@pytest.fixture
def inside(outside: Path) -> str:
    return f"/tmp/{outside.name}"


_ids = iter(range(10**6))


async def sh(channel: AgentChannel, text: str, user: str = "") -> bytes:
    spec = ExecSpec(exec_id=f"f{next(_ids)}", argv=("/bin/sh", "-c", text), user=user)
    result = await channel.exec(spec)
    assert result.exit_code == 0, result
    return result.stdout


async def test_bytes_come_back_as_they_were(channel: AgentChannel, inside: str) -> None:
    for size in (0, 1, 65_535, 65_536, 65_537, 5 * MIB):
        data = os.urandom(size)
        await channel.files.write(f"{inside}/x", data)
        got = await channel.files.read(f"{inside}/x")
        assert (got.data == data, got.size) == (True, size)


async def test_read_from_an_offset_and_no_more_than_asked(
    channel: AgentChannel, inside: str
) -> None:
    await channel.files.write(f"{inside}/x", b"0123456789")
    got = await channel.files.read(f"{inside}/x", offset=3, max_bytes=4)
    assert (got.data, got.size) == (b"3456", 10)
    assert (await channel.files.read(f"{inside}/x", offset=100)).data == b""
    assert (await channel.files.read(f"{inside}/x", max_bytes=0)).data == b""


async def test_files_of_proc_have_content_without_size(channel: AgentChannel) -> None:
    got = await channel.files.read("/proc/self/status")
    assert got.data.startswith(b"Name:\taether")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/absent", FileNotFoundError),
        ("/etc/passwd/x", NotADirectoryError),
        ("/etc", IsADirectoryError),
        ("", FileNotFoundError),
        ("/tmp/" + "n" * 300, OSError),
    ],
)
async def test_reading_what_is_no_file(
    channel: AgentChannel, path: str, kind: type[OSError]
) -> None:
    with pytest.raises(kind):
        await channel.files.read(path)


async def test_special_files_are_refused_not_waited_for(channel: AgentChannel, inside: str) -> None:
    await sh(channel, f"mkfifo {inside}/fifo")
    for path in (f"{inside}/fifo", "/dev/zero"):
        with pytest.raises(OSError, match="Invalid") as caught:
            await channel.files.read(path)
        assert caught.value.errno == errno.EINVAL
        with pytest.raises(OSError, match="Invalid"):
            await channel.files.write(path, b"x")
    assert (await channel.files.stat("/dev/zero")).kind is FileKind.OTHER


# --- modes, owners, users ---


async def test_mode_is_given_kept_or_usual(
    channel: AgentChannel, inside: str, outside: Path
) -> None:
    async def mode_after(path: str, **more: int) -> int:
        await channel.files.write(f"{inside}/{path}", b"x", **more)
        return stat.S_IMODE((outside / path).stat().st_mode)

    assert await mode_after("new") == 0o644
    assert await mode_after("tool", mode=0o755) == 0o755
    assert await mode_after("tool") == 0o755
    assert await mode_after("tool", mode=0o4711) == 0o4711
    await channel.files.make_dir(f"{inside}/d", mode=0o1777)
    assert stat.S_IMODE((outside / "d").stat().st_mode) == 0o1777


async def test_owner_is_the_user_and_root_keeps_anothers(
    channel: AgentChannel, inside: str, outside: Path
) -> None:
    await channel.files.write(f"{inside}/mine", b"x", user="alice")
    await channel.files.write(f"{inside}/mine", b"from root")
    owner = (outside / "mine").stat()
    assert (owner.st_uid, owner.st_gid) == (1000, 1000)
    await channel.files.make_dir(f"{inside}/a/b/c", user="alice")
    assert (outside / "a" / "b").stat().st_uid == 1000


async def test_the_users_rights_decide(channel: AgentChannel, inside: str) -> None:
    await channel.files.write(f"{inside}/private", b"x", mode=0o600)
    await channel.files.make_dir(f"{inside}/closed", mode=0o700)
    with pytest.raises(PermissionError):
        await channel.files.read(f"{inside}/private", user="alice")
    with pytest.raises(PermissionError):
        await channel.files.write("/etc/passwd", b"x", user="alice")
    with pytest.raises(PermissionError):
        await channel.files.list(f"{inside}/closed", user="alice")
    with pytest.raises(PermissionError):
        await channel.files.remove("/etc/passwd", user="alice")
    with pytest.raises(AgentStartError) as caught:
        await channel.files.read("/etc/passwd", user="nobody-here")
    assert caught.value.stage is Stage.USER


async def test_supplementary_groups_count(channel: AgentChannel, inside: str) -> None:
    await sh(channel, f"echo for staff > {inside}/x; chmod 640 {inside}/x; chgrp 50 {inside}/x")
    assert (await channel.files.read(f"{inside}/x", user="alice")).data == b"for staff\n"


# --- writing is all or nothing ---


async def test_a_write_that_is_given_up_leaves_nothing(
    channel: AgentChannel, sandbox: AgentSandbox, inside: str, outside: Path
) -> None:
    await channel.files.write(f"{inside}/x", b"old")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await asyncio.gather(
                channel.files.write(f"{inside}/x", bytes(400 * MIB)),
                sh(channel, "sleep 5"),
            )
    await _quiet(outside, {"x"})
    assert (outside / "x").read_bytes() == b"old"


async def test_a_write_whose_edge_dies_leaves_nothing(
    sandbox: AgentSandbox, inside: str, outside: Path
) -> None:
    channel = await AgentChannel.connect(sandbox.socket)
    await channel.files.write(f"{inside}/x", b"old")
    writing = asyncio.create_task(channel.files.write(f"{inside}/x", bytes(400 * MIB)))
    while len(list(outside.iterdir())) < 2:
        await asyncio.sleep(0.001)
    await channel.aclose()
    with pytest.raises(Exception, match="closed by this edge"):
        await writing
    await _quiet(outside, {"x"})
    assert (outside / "x").read_bytes() == b"old"


async def _quiet(where: Path, expected: set[str]) -> None:
    async with asyncio.timeout(5):
        while {path.name for path in where.iterdir()} != expected:
            await asyncio.sleep(0.01)


async def test_an_operation_meets_its_deadline(channel: AgentChannel, inside: str) -> None:
    with pytest.raises(TimeoutError):
        await channel.files.write(f"{inside}/x", bytes(800 * MIB), timeout_s=0.05)
    assert (await channel.files.list(inside)).total == 0


async def test_a_reader_sees_old_or_new_never_between(
    channel: AgentChannel, inside: str, outside: Path
) -> None:
    old, new = b"a" * MIB, b"b" * MIB
    await channel.files.write(f"{inside}/x", old)
    seen = set()
    for data in (new, old) * 10:
        writing = asyncio.create_task(channel.files.write(f"{inside}/x", data))
        while not writing.done():
            seen.add((outside / "x").read_bytes())
            await asyncio.sleep(0)
        await writing
    assert seen <= {old, new}


async def test_a_full_disk_is_told_and_leaves_nothing(channel: AgentChannel) -> None:
    await channel.files.write("/small/x", b"old")
    with pytest.raises(OSError, match="No space") as caught:
        await channel.files.write("/small/x", bytes(3 * MIB))
    assert caught.value.errno == errno.ENOSPC
    assert (await channel.files.read("/small/x")).data == b"old"
    assert (await channel.files.list("/small")).total == 1


async def test_writing_follows_a_final_link_and_keeps_it(
    channel: AgentChannel, inside: str, outside: Path
) -> None:
    await sh(
        channel,
        f"cd {inside}; mkdir d; ln -s d/real link; ln -s /../..{inside}/abs two; ln -s loop loop",
    )
    await channel.files.write(f"{inside}/link", b"through")
    assert (outside / "d" / "real").read_bytes() == b"through"
    assert (outside / "link").is_symlink()
    await channel.files.write(f"{inside}/two", b"absolute")
    assert (outside / "abs").read_bytes() == b"absolute"
    with pytest.raises(OSError, match="Too many levels"):
        await channel.files.write(f"{inside}/loop", b"x")


# --- listing, removing, renaming ---


async def test_entries_say_what_they_are(channel: AgentChannel, inside: str) -> None:
    await sh(
        channel,
        f"cd {inside}; printf 12345 > f; chmod 640 f; mkdir d; ln -s /absent l; mkfifo p; "
        "touch -d @1700000000 f",
    )
    listing = await channel.files.list(inside)
    entries = {entry.name: entry for entry in listing.entries}
    assert listing.total == 4
    assert {name: entry.kind for name, entry in entries.items()} == {
        "f": FileKind.FILE,
        "d": FileKind.DIRECTORY,
        "l": FileKind.SYMLINK,
        "p": FileKind.OTHER,
    }
    f = entries["f"]
    assert (f.size, stat.S_IMODE(f.mode), f.mtime_ns) == (5, 0o640, 1_700_000_000 * 10**9)
    assert entries["l"].target == "/absent"
    assert (await channel.files.stat(f"{inside}/l")).kind is FileKind.SYMLINK
    with pytest.raises(FileNotFoundError):
        await channel.files.stat(f"{inside}/l", follow=True)


async def test_names_are_bytes(channel: AgentChannel, inside: str, outside: Path) -> None:
    strange = os.fsdecode(b"\xff\n'\"; $(x)")
    await channel.files.write(f"{inside}/{strange}", b"x")
    assert [entry.name for entry in (await channel.files.list(inside)).entries] == [strange]
    await channel.files.remove(f"{inside}/{strange}")
    assert list(outside.iterdir()) == []


async def test_a_large_directory_is_listed_and_removed(
    channel: AgentChannel, inside: str, outside: Path
) -> None:
    for index in range(20_000):
        (outside / f"file-{index}").touch()
    listing = await channel.files.list(inside)
    assert len(listing.entries) == listing.total == 20_000
    some = await channel.files.list(inside, max_entries=10)
    assert (len(some.entries), some.total) == (10, 20_000)
    await channel.files.remove(inside, recursive=True)
    assert not outside.exists()


async def test_removal_is_of_links_not_of_what_they_show(
    channel: AgentChannel, inside: str, outside: Path
) -> None:
    (outside / "kept").mkdir()
    (outside / "kept" / "file").touch()
    await sh(channel, f"cd {inside}; mkdir gone; ln -s ../kept gone/link; ln -s kept direct")
    with pytest.raises(OSError, match="not empty"):
        await channel.files.remove(f"{inside}/gone")
    await channel.files.remove(f"{inside}/gone", recursive=True)
    await channel.files.remove(f"{inside}/direct", recursive=True)
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert (outside / "kept" / "file").exists()


async def test_a_deep_tree_is_removed(channel: AgentChannel, inside: str, outside: Path) -> None:
    await sh(channel, f"cd {inside}; i=0; while [ $i -lt 900 ]; do mkdir d; cd d; i=$((i+1)); done")
    await channel.files.remove(f"{inside}/d", recursive=True)
    assert list(outside.iterdir()) == []


async def test_directories_with_and_without_parents(channel: AgentChannel, inside: str) -> None:
    await channel.files.make_dir(f"{inside}//a/b/")
    await channel.files.make_dir(f"{inside}/a/b")  # existing is fine
    with pytest.raises(FileExistsError):
        await channel.files.make_dir(f"{inside}/a", parents=False)
    with pytest.raises(FileNotFoundError):
        await channel.files.make_dir(f"{inside}/x/y", parents=False)
    await channel.files.write(f"{inside}/file", b"")
    with pytest.raises(NotADirectoryError):
        await channel.files.make_dir(f"{inside}/file/below")
    with pytest.raises(FileExistsError):
        await channel.files.make_dir(f"{inside}/file")


async def test_rename_replaces_as_the_kernel_does(channel: AgentChannel, inside: str) -> None:
    await channel.files.write(f"{inside}/a", b"a")
    await channel.files.write(f"{inside}/b", b"b")
    await channel.files.rename(f"{inside}/a", f"{inside}/b")
    assert (await channel.files.read(f"{inside}/b")).data == b"a"
    with pytest.raises(FileNotFoundError):
        await channel.files.rename(f"{inside}/a", f"{inside}/c")


@pytest.mark.parametrize("path", ["/", "//", "/.", "/tmp/..", "/tmp/."])
async def test_the_root_and_dots_are_not_removed(channel: AgentChannel, path: str) -> None:
    with pytest.raises(OSError, match=r"busy|Invalid"):
        await channel.files.remove(path, recursive=True)


# --- never out of the sandbox ---


async def test_links_and_dots_stay_inside(
    channel: AgentChannel, sandbox: AgentSandbox, inside: str
) -> None:
    host = str(sandbox.root.parent / "host-secret")
    await sh(
        channel, f"cd {inside}; ln -s {host} abs; ln -s ../../../../../..{host} rel; ln -s / root"
    )
    for path in (
        host,
        f"{inside}/abs",
        f"{inside}/rel",
        f"{inside}/root/../../..{host}",
        f"/../../../..{host}",
        f"/proc/1/root{host}",
    ):
        with pytest.raises(OSError, match=r".") as caught:
            await channel.files.read(path)
        assert caught.value.errno in {errno.ENOENT, errno.EACCES, errno.ELOOP}, path
    assert (await channel.files.read(f"{inside}/root/../../etc/passwd")).data


async def test_magic_links_are_refused(channel: AgentChannel) -> None:
    for path in ("/proc/self/exe", "/proc/self/fd/3/etc/passwd", "/proc/self/root/etc/passwd"):
        with pytest.raises(OSError, match="Too many levels"):
            await channel.files.read(path)


async def test_a_directory_swapped_for_a_link_leads_nowhere(
    channel: AgentChannel, sandbox: AgentSandbox, inside: str, outside: Path
) -> None:
    """Alice races root's recursive removal with links to what must stay."""
    (sandbox.root / "precious").mkdir(exist_ok=True)
    for index in range(50):
        (sandbox.root / "precious" / f"{index}").touch()
    race = f"""cd {inside}; while :; do
        mkdir -p t/a/b; touch t/a/b/c; mv t/a t/x; ln -s /precious t/a
        mv t/x t/y; ln -s /precious t/y/b2
        rm -f t/a; rm -rf t/y; done 2> /dev/null"""
    spec = ExecSpec(exec_id=f"f{next(_ids)}", argv=("/bin/sh", "-c", race), user="alice")
    racer = await channel.start(spec, watch=True)
    for _ in range(150):
        try:
            await channel.files.remove(f"{inside}/t", recursive=True)
        except OSError:
            continue
    await channel.kill(racer.exec_id)
    assert len(list((sandbox.root / "precious").iterdir())) == 50


async def test_many_operations_at_once(channel: AgentChannel, inside: str) -> None:
    async def one(index: int) -> bool:
        data = bytes([index % 256]) * (index * 100)
        await channel.files.write(f"{inside}/{index}", data)
        return (await channel.files.read(f"{inside}/{index}")).data == data

    assert all(await asyncio.gather(*(one(index) for index in range(200))))
    assert (await channel.files.list(inside)).total == 200
