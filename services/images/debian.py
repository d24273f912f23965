"""The Debian base: what a pure-Python project's own tests need, and little else.

Bootstrapped from the package sources this machine itself uses. mmdebstrap makes the archive
reproducible for the same packages; what it would copy from this host (its name, its resolver) is
replaced by empty files.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from libhost import command
from libhost.errors import UnsupportedError

_FEATURE = "the Debian base image"
_SUITE = "bookworm"
_PACKAGES = ("ca-certificates", "python-is-python3", "python3-pip", "python3-pytest")
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*")
_FROM_HOST = ("/etc/hostname", "/etc/resolv.conf")
_NOT_LATER_THAN = 1_700_000_000  # files made by the bootstrap itself get this time
_TIMEOUT_S = 900.0


def fingerprint() -> str:
    return hashlib.blake2b(repr(_options()).encode(), digest_size=32).hexdigest()


def make(archive: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise UnsupportedError(
            _FEATURE, "there is no mmdebstrap on this machine", "apt-get install mmdebstrap"
        )
    with TemporaryDirectory(prefix="dsec-debian-") as scratch:
        empty = Path(scratch) / "empty"
        empty.touch(mode=0o644)
        hooks = [f"--customize-hook=upload {empty} {path}" for path in _FROM_HOST]
        command.run(
            ["mmdebstrap", *_options(), *hooks, _SUITE, str(archive), *_sources()],
            timeout_s=_TIMEOUT_S,
            env={"SOURCE_DATE_EPOCH": str(_NOT_LATER_THAN)},
            log=Path(scratch) / "log",
        )
    _finish(archive)


def _options() -> list[str]:
    return [
        "--mode=root", "--variant=minbase", "--format=tar", f"--include={','.join(_PACKAGES)}",
        "--skip=output/dev", *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
    ]  # fmt: skip


def _finish(archive: Path) -> None:
    """Leaving out the device nodes leaves out their directory too, and a sandbox mounts on it.

    The emptied files come out executable; of two members of one name the last counts.
    """
    with tarfile.open(archive, "a", format=tarfile.PAX_FORMAT) as tar:
        _append(tar, "./dev", tarfile.DIRTYPE, 0o755)
        for path in _FROM_HOST:
            _append(tar, f".{path}", tarfile.REGTYPE, 0o644)


def _append(tar: tarfile.TarFile, name: str, kind: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.mtime = kind, mode, _NOT_LATER_THAN
    tar.addfile(member)


def _sources() -> list[str]:
    """This machine's own entries for the suite, or none: then mmdebstrap has a default."""
    places = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    return sorted(
        str(place)
        for place in places
        if place.suffix in (".list", ".sources") and place.is_file() and _is_for_suite(place)
    )


def _is_for_suite(place: Path) -> bool:
    lines = place.read_text().splitlines()
    return any(_SUITE in line.split() for line in lines if not line.lstrip().startswith("#"))
