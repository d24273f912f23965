"""The base images that are made on the spot: reproducible, and good enough to run something in."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from libdsec.wire.layer import LayerKind
from libhost.erofs import mount_image
from libhost.errors import UnsupportedError
from services.edge.layers.build import BuildLimits, build_layer
from services.images import RECIPES, busybox, cached

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts and chroot need root"),
]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    try:
        return cached(RECIPES["busybox"], tmp_path / "cache")
    except UnsupportedError as err:
        pytest.skip(str(err))


def test_a_second_call_is_a_look_up_and_a_fresh_one_the_same_bytes(
    archive: Path, tmp_path: Path
) -> None:
    inode = archive.stat().st_ino
    assert cached(RECIPES["busybox"], tmp_path / "cache") == archive
    assert archive.stat().st_ino == inode
    again = cached(RECIPES["busybox"], tmp_path / "cache", refresh=True)
    assert again.stat().st_ino != inode
    elsewhere = cached(RECIPES["busybox"], tmp_path / "elsewhere")
    assert elsewhere.read_bytes() == again.read_bytes()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        archive.name, "busybox.lock"
    ]  # fmt: skip


def test_the_busybox_base_runs_a_shell_as_root_and_as_a_user(archive: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    built = build_layer(archive, work, LayerKind.BASE, BuildLimits())
    root = mount_image(built.path)
    try:
        script = "echo $0; env -i id -un; su user -c 'id -u; pwd; test -w /tmp; stat -c %a /tmp'"
        said = subprocess.run(
            ["chroot", f"/proc/self/fd/{root}", "/bin/sh", "-c", script],
            pass_fds=[root], capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    finally:
        os.close(root)
    assert said.stdout.split("\n") == ["/bin/sh", "root", "1000", "/", "1777", ""], said.stderr


def test_a_program_that_is_not_static_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(busybox.shutil, "which", lambda _name: "/bin/sh")
    with pytest.raises(UnsupportedError, match=r"not a static.*busybox-static"):
        busybox.make(tmp_path / "a.tar")
    monkeypatch.setattr(busybox.shutil, "which", lambda _name: None)
    with pytest.raises(UnsupportedError, match=r"no busybox.*busybox-static"):
        busybox.make(tmp_path / "a.tar")


def test_every_member_of_the_busybox_base_is_owned_by_number_and_of_1970(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
    assert {member.mtime for member in members} == {0}
    assert {member.uid for member in members} == {0, 1000}
    assert {member.uname for member in members} == {""}
