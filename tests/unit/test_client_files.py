"""Files and trees, in both directions, honest sandboxes and lying ones."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from libdsec import (
    Conflict,
    DataLoss,
    DSecClient,
    FileNotFound,
    InvalidArgument,
    IsADirectory,
    NotADirectory,
    Sandbox,
    Transferred,
    connection,
)
from libdsec.transfer import plan_upload
from libdsec.wire.defaults import FILE_CHUNK_BYTES
from libdsec.wire.files import FileStat, FileWrite
from tests.world.memory import MemoryLink, MemoryServer
from tests.world.world import World

LARGE = bytes(range(256)) * (FILE_CHUNK_BYTES // 256) * 3  # exactly three chunks


@pytest.fixture
async def sandbox(client: DSecClient) -> Sandbox:
    return await client.create(image="busybox")


@pytest.fixture
def there(world: World) -> Path:
    """The sandbox's directory as it really is."""
    return world.edge.home


async def test_write_and_read_back(sandbox: Sandbox, there: Path) -> None:
    for data in (b"", b"one\r\ntwo\n\0", LARGE, LARGE + b"x"):
        await sandbox.files.write("deep/er/file", data)
        assert (there / "deep/er/file").read_bytes() == data
        assert await sandbox.files.read("deep/er/file") == data
    await sandbox.files.write("text", "héllo\r\n", 0o600)
    assert await sandbox.files.read_text("text") == "héllo\r\n"
    assert stat.S_IMODE((there / "text").stat().st_mode) == 0o600
    await sandbox.files.write("text", "again")  # no mode: as it was
    assert stat.S_IMODE((there / "text").stat().st_mode) == 0o600


async def test_errors_are_typed_and_the_builtin_kind(sandbox: Sandbox, there: Path) -> None:
    (there / "dir").mkdir()
    (there / "file").write_text("x")
    with pytest.raises(FileNotFound) as caught:
        await sandbox.files.read("nothing")
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.request_id
    with pytest.raises(IsADirectoryError) as directory:
        await sandbox.files.read("dir")
    assert isinstance(directory.value, IsADirectory)
    with pytest.raises(NotADirectoryError) as component:
        await sandbox.files.list("file/below")
    assert isinstance(component.value, NotADirectory)
    await sandbox.files.write("bytes", b"\xff")
    with pytest.raises(UnicodeDecodeError):
        await sandbox.files.read_text("bytes")
    with pytest.raises(InvalidArgument):
        await sandbox.files.read("")


async def test_a_file_larger_than_allowed_is_not_cut_off(sandbox: Sandbox, there: Path) -> None:
    (there / "large").write_bytes(LARGE)
    with pytest.raises(InvalidArgument, match="max_bytes=1000"):
        await sandbox.files.read("large", 1000)


async def test_a_file_that_changes_is_read_again(
    world: World, sandbox: Sandbox, there: Path
) -> None:
    (there / "large").write_bytes(LARGE)
    world.edge.tree.change_during_read = 1
    assert await sandbox.files.read("large") == LARGE
    world.edge.tree.change_during_read = 100
    with pytest.raises(Conflict, match="changed"):
        await sandbox.files.read("large")


async def test_stat_list_and_exists_tell_links_as_links(sandbox: Sandbox, there: Path) -> None:
    (there / "file").write_bytes(b"12345")
    (there / "link").symlink_to("nowhere")
    (there / "dir").mkdir()
    entries = {Path(e.path).name: e for e in await sandbox.files.list(".")}
    assert {name: e.kind for name, e in entries.items()} == {
        "dir": "dir", "file": "file", "link": "link"
    }  # fmt: skip
    assert entries["link"].target == "nowhere"
    assert (await sandbox.files.stat("file")).size_bytes == 5
    assert await sandbox.files.exists("link")
    assert not await sandbox.files.exists("nothing")
    assert not await sandbox.files.exists("file/below")


async def test_a_long_listing_says_what_is_not_in_it(
    world: World, sandbox: Sandbox, there: Path
) -> None:
    for number in range(5):
        (there / f"f{number}").touch()
    world.edge.tree.list_limit = 3
    listing = await sandbox.files.list(".")
    assert (len(listing), listing.dropped) == (3, 2)


async def test_remove_rename_and_make_dir(sandbox: Sandbox, there: Path) -> None:
    await sandbox.files.make_dir("a/b", 0o700)
    await sandbox.files.make_dir("a/b", 0o750)
    assert stat.S_IMODE((there / "a/b").stat().st_mode) == 0o750
    await sandbox.files.write("a/b/f", b"x")
    await sandbox.files.rename("a/b/f", "a/g")
    with pytest.raises(Conflict, match="not empty"):
        await sandbox.files.remove("a")
    await sandbox.files.remove("a", recursive=True)
    assert not (there / "a").exists()


def tree(root: Path) -> dict[str, tuple[str, int, object]]:
    found: dict[str, tuple[str, int, object]] = {}
    for directory, names, files in os.walk(root):
        for name in names + files:
            path = Path(directory) / name
            mode = stat.S_IMODE(path.lstat().st_mode)
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = ("link", 0, os.readlink(path))
            elif path.is_dir():
                found[key] = ("dir", mode, None)
            else:
                found[key] = ("file", mode, path.read_bytes())
    return found


@pytest.fixture
def local(tmp_path: Path) -> Path:
    root = tmp_path / "local"
    (root / "src/empty").mkdir(parents=True)
    (root / "src/run.sh").write_text("#!/bin/sh\n")
    (root / "src/run.sh").chmod(0o755)
    (root / "large").write_bytes(LARGE + b"end")
    (root / "out").symlink_to("/etc/passwd")
    (root / "dangling").symlink_to("no/where")
    (root / "closed").mkdir()
    (root / "closed/secret").write_text("s")
    (root / "closed/secret").chmod(0o600)
    (root / "closed").chmod(0o555)
    return root


async def test_a_tree_goes_up_and_comes_down_as_it_was(
    sandbox: Sandbox, there: Path, local: Path, tmp_path: Path
) -> None:
    seen: list[Transferred] = []
    sent = await sandbox.files.upload(local, "copy", on_progress=seen.append)
    assert tree(there / "copy") == tree(local)
    assert sent == Transferred(files=3, directories=4, links=2, size_bytes=len(LARGE) + 3 + 10 + 1)
    assert seen[-1] == sent
    back = tmp_path / "back"
    received = await sandbox.files.download("copy", back)
    assert tree(back) == tree(local)
    assert received == sent


async def test_single_files_go_where_they_are_told(
    sandbox: Sandbox, there: Path, local: Path, tmp_path: Path
) -> None:
    await sandbox.files.upload(local / "src/run.sh", "bin/")
    await sandbox.files.upload(local / "large", "deep/er/large")
    await sandbox.files.upload(local / "src/run.sh", "bin/renamed")
    for name in ("run.sh", "renamed"):
        assert stat.S_IMODE((there / "bin" / name).stat().st_mode) == 0o755
    (there / "link").symlink_to("bin/run.sh")
    await sandbox.files.download("link", tmp_path / "followed")
    assert (tmp_path / "followed").read_text() == "#!/bin/sh\n"
    (tmp_path / "into").mkdir()
    await sandbox.files.download("bin/renamed", tmp_path / "into")
    assert os.access(tmp_path / "into/renamed", os.X_OK)
    with pytest.raises(FileNotFound):
        await sandbox.files.download("nothing", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_what_is_no_file_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "fine").touch()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "sock"))
        with pytest.raises(InvalidArgument, match="sock"):
            plan_upload(tmp_path, "there")
    with pytest.raises(FileNotFoundError):
        plan_upload(tmp_path / "nothing", "there")


def entry(path: str, kind: str = "file", **more: object) -> FileStat:
    return FileStat(
        path=path, kind=kind, size_bytes=1, mode=0o644, uid=0, gid=0, mtime=0, **more
    )  # fmt: skip


@pytest.mark.parametrize("name", ["..", ".", "", "a/.."])
async def test_a_lying_sandbox_cannot_name_a_place_to_write(
    world: World, sandbox: Sandbox, there: Path, tmp_path: Path, name: str
) -> None:
    (there / "d").mkdir()
    world.edge.tree.forged = (entry(name),)
    with pytest.raises(DataLoss, match="named"):
        await sandbox.files.download("d", tmp_path / "in")


async def test_a_lying_sandbox_cannot_write_through_its_own_link(
    world: World, sandbox: Sandbox, there: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (there / "d").mkdir()
    # First a link that leads out, then a directory of the same name below which a file would land.
    world.edge.tree.forged = (entry("x", "link", target=str(outside)), entry("x", "dir"))
    with pytest.raises(OSError, match="x"):
        await sandbox.files.download("d", tmp_path / "in")
    assert list(outside.iterdir()) == []


async def test_set_uid_does_not_come_home(sandbox: Sandbox, there: Path, tmp_path: Path) -> None:
    (there / "suid").write_text("x")
    (there / "suid").chmod(0o4755)
    await sandbox.files.download("suid", tmp_path / "suid")
    assert stat.S_IMODE((tmp_path / "suid").stat().st_mode) == 0o755


async def test_a_directory_too_large_to_list_is_not_half_downloaded(
    world: World, sandbox: Sandbox, there: Path, tmp_path: Path
) -> None:
    (there / "d").mkdir()
    for number in range(5):
        (there / "d" / f"f{number}").touch()
    world.edge.tree.list_limit = 3
    with pytest.raises(DataLoss, match="2 entries"):
        await sandbox.files.download("d", tmp_path / "in")


async def test_large_data_takes_the_second_connection(
    client: DSecClient, sandbox: Sandbox, server: MemoryServer
) -> None:
    links = len(server.links)
    await sandbox.files.write("small", b"x")
    await sandbox.files.read("small")
    assert len(server.links) == links
    await sandbox.files.write("large", LARGE)
    assert len(server.links) == links + 1


@pytest.mark.parametrize(
    ("size", "again"),
    [(10, True), (FILE_CHUNK_BYTES + 10, False)],
    ids=["one chunk", "the last of several"],
)
async def test_a_slow_write_is_asked_again_only_where_that_is_harmless(
    server: MemoryServer,
    sandbox: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    again: bool,
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.05)
    asked: list[FileWrite] = []
    publish = server.publish

    def slow(sender: MemoryLink, msg: Msg) -> None:
        if msg.subject.endswith(".files.write"):
            asked.append(FileWrite.model_validate_json(msg.data))
            if asked[-1].last:
                asyncio.get_running_loop().call_later(0.3, publish, sender, msg)
                return
        publish(sender, msg)

    monkeypatch.setattr(server, "publish", slow)
    await sandbox.files.write("/tmp/slow", b"x" * size)
    lasts = [message for message in asked if message.last]
    assert (len(lasts) > 1) is again
