"""What files inside a sandbox must be like."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from libdsec import (
    DSecError,
    Exited,
    FileNotFound,
    IsADirectory,
    NotADirectory,
    Output,
    Sandbox,
)
from libdsec.wire.defaults import FILE_CHUNK_BYTES

from .case import BYTES, Cases


class FileCases(Cases):
    """files.*."""

    @pytest.mark.parametrize(
        "data", [b"", b"\0", BYTES, b"a\r\nb\n", BYTES * (FILE_CHUNK_BYTES // 256),
                 BYTES * (FILE_CHUNK_BYTES // 100)],
        ids=["empty", "nul", "bytes", "newlines", "one-chunk", "chunks"],
    )  # fmt: skip
    async def test_what_is_written_is_read(self, sandbox: Sandbox, home: str, data: bytes) -> None:
        await sandbox.files.write(f"{home}/f", data)
        assert await sandbox.files.read(f"{home}/f") == data
        assert int((await sandbox.exec(f"wc -c < {home}/f")).stdout) == len(data)

    async def test_text_is_utf8(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/t", "héllo\r\n")
        assert await sandbox.files.read_text(f"{home}/t") == "héllo\r\n"

    async def test_missing_directories_are_made(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/a/b/c", b"x")
        assert (await sandbox.files.stat(f"{home}/a/b")).kind == "dir"

    async def test_a_mode_is_set_and_kept(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/s", "#!/bin/sh\necho ran\n", 0o755)
        assert (await sandbox.exec([f"{home}/s"])).stdout == "ran\n"
        await sandbox.files.write(f"{home}/s", "#!/bin/sh\necho again\n")
        assert (await sandbox.exec([f"{home}/s"])).stdout == "again\n"

    async def test_a_file_is_replaced_whole_or_not_at_all(
        self, sandbox: Sandbox, home: str
    ) -> None:
        """A reader that began before the write sees the old content to its end."""
        old, new = b"o" * 1_000_000, b"n" * 1_000_000
        await sandbox.files.write(f"{home}/f", old)
        reader = await sandbox.start(
            f"exec 3<{home}/f; echo open; read go; cat <&3 | tr -d o | wc -c"
        )
        async for event in reader:
            if isinstance(event, Output) and event.data == b"open\n":
                await sandbox.files.write(f"{home}/f", new)
                await reader.write("go\n")
                await reader.close_stdin()
            if isinstance(event, Exited):
                assert event.result.stdout.split() == ["open", "0"]
        assert await sandbox.files.read(f"{home}/f") == new

    async def test_errors_name_their_kind(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/file", b"x")
        with pytest.raises(FileNotFound):
            await sandbox.files.read(f"{home}/nothing")
        with pytest.raises(IsADirectory):
            await sandbox.files.read(home)
        with pytest.raises(IsADirectory):
            await sandbox.files.write(home, b"x")
        with pytest.raises(NotADirectory):
            await sandbox.files.read(f"{home}/file/below")
        with pytest.raises(NotADirectory):
            await sandbox.files.list(f"{home}/file")
        with pytest.raises(FileNotFound):
            await sandbox.files.remove(f"{home}/nothing")

    async def test_a_listing_tells_what_is_there(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.exec(f"cd {home} && printf 12345 > f && mkdir d && ln -s f l && chmod 640 f")
        found = {Path(e.path).name: e for e in await sandbox.files.list(home)}
        assert {name: e.kind for name, e in found.items()} == {"f": "file", "d": "dir", "l": "link"}
        assert (found["f"].size_bytes, found["f"].mode & 0o777) == (5, 0o640)
        assert found["l"].target == "f"

    async def test_stat_and_exists_do_not_follow_links(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.exec(["ln", "-s", "nowhere", f"{home}/l"])
        assert (await sandbox.files.stat(f"{home}/l")).kind == "link"
        assert await sandbox.files.exists(f"{home}/l")
        assert not await sandbox.files.exists(f"{home}/nowhere")

    async def test_a_link_out_of_the_tree_leads_to_the_sandboxs_own_root(
        self, sandbox: Sandbox, home: str
    ) -> None:
        await sandbox.files.write(f"{home}/inside", b"mine")
        up = "../" * 40
        await sandbox.exec(["ln", "-s", f"{up}{home.lstrip('/')}/inside", f"{home}/l"])
        assert await sandbox.files.read(f"{home}/l") == b"mine"

    async def test_rename_replaces(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/a", b"a")
        await sandbox.files.write(f"{home}/b", b"b")
        await sandbox.files.rename(f"{home}/a", f"{home}/b")
        assert await sandbox.files.read(f"{home}/b") == b"a"
        assert not await sandbox.files.exists(f"{home}/a")

    async def test_remove_takes_a_tree_only_when_told(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.write(f"{home}/d/e/f", b"x")
        with pytest.raises(DSecError):
            await sandbox.files.remove(f"{home}/d")
        assert await sandbox.files.exists(f"{home}/d/e/f")
        await sandbox.files.remove(f"{home}/d", recursive=True)
        assert not await sandbox.files.exists(f"{home}/d")

    async def test_removing_a_link_leaves_what_it_points_to(
        self, sandbox: Sandbox, home: str
    ) -> None:
        await sandbox.files.write(f"{home}/d/f", b"x")
        await sandbox.exec(["ln", "-s", "d", f"{home}/l"])
        await sandbox.files.remove(f"{home}/l", recursive=True)
        assert await sandbox.files.read(f"{home}/d/f") == b"x"

    async def test_a_directory_is_made_once_or_again(self, sandbox: Sandbox, home: str) -> None:
        await sandbox.files.make_dir(f"{home}/x/y", 0o750)
        await sandbox.files.make_dir(f"{home}/x/y", 0o750)
        assert (await sandbox.files.stat(f"{home}/x/y")).mode & 0o777 == 0o750
        with pytest.raises(DSecError):
            await sandbox.files.make_dir(f"{home}/x/y", parents=False)

    async def test_a_tree_goes_up_and_comes_down_as_it_was(
        self, sandbox: Sandbox, home: str, tmp_path: Path
    ) -> None:
        source = tmp_path / "source"
        (source / "d/empty").mkdir(parents=True)
        (source / "d/run").write_text("#!/bin/sh\n")
        (source / "d/run").chmod(0o755)
        (source / "large").write_bytes(BYTES * (FILE_CHUNK_BYTES // 100))
        (source / "link").symlink_to("d/run")
        (source / "dangling").symlink_to("/no/where")
        await sandbox.files.upload(source, f"{home}/copy")
        await sandbox.files.download(f"{home}/copy", tmp_path / "back")
        assert _tree(tmp_path / "back") == _tree(source)
        await sandbox.files.upload(source, f"{home}/copy")  # over itself, links included


def _tree(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        content = path.read_bytes() if stat.S_ISREG(mode) else None
        target = os.readlink(path) if stat.S_ISLNK(mode) else None
        kept = None if target else stat.S_IMODE(mode)
        found[str(path.relative_to(root))] = (stat.S_IFMT(mode), kept, content, target)
    return found
