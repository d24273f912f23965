"""The busybox base: one static program, a link for each of its tools, and the usual directories.

Written member by member, so that it is the same bytes wherever the program is the same.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import struct
import tarfile
from pathlib import Path

from libhost import command
from libhost.errors import UnsupportedError

_FEATURE = "the busybox base image"
_HINT = "apt-get install busybox-static"
_PROGRAM = "bin/busybox"
_ELF64 = b"\x7fELF\x02"
_PT_INTERP = 3

_DIRECTORIES: dict[str, int] = {
    "bin": 0o755, "dev": 0o755, "etc": 0o755, "home": 0o755, "home/user": 0o755, "opt": 0o755,
    "proc": 0o555, "root": 0o700, "run": 0o755, "sbin": 0o755, "sys": 0o555, "tmp": 0o1777,
    "usr": 0o755, "usr/bin": 0o755, "usr/lib": 0o755, "usr/sbin": 0o755, "var": 0o755,
    "var/log": 0o755, "var/tmp": 0o1777,
}  # fmt: skip
_FILES: dict[str, str] = {
    "etc/passwd": (
        "root:x:0:0:root:/root:/bin/sh\n"
        "user:x:1000:1000:user:/home/user:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/:/bin/false\n"
    ),
    "etc/group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/hostname": "",
    "etc/resolv.conf": "",
    "etc/profile": "export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n",
}
_OWNERS = {"home/user": 1000}
_VERSION = b"1"  # of everything above, in the fingerprint


def fingerprint() -> str:
    return hashlib.blake2b(_program().read_bytes() + _VERSION, digest_size=32).hexdigest()


def make(archive: Path) -> None:
    program = _program()
    listing = command.run([str(program), "--list-full"], timeout_s=10).stdout.decode()
    tools = sorted({*listing.split(), "bin/sh"} - {_PROGRAM})
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, ".", tarfile.DIRTYPE, 0o755)
        for name, mode in _DIRECTORIES.items():
            _add(tar, name, tarfile.DIRTYPE, mode)
        for name, text in _FILES.items():
            _add(tar, name, tarfile.REGTYPE, 0o644, text.encode())
        _add(tar, _PROGRAM, tarfile.REGTYPE, 0o755, program.read_bytes())
        for tool in tools:
            _add(tar, tool, tarfile.SYMTYPE, 0o777, link=f"/{_PROGRAM}")


def _add(
    tar: tarfile.TarFile, name: str, kind: bytes, mode: int, data: bytes = b"", link: str = ""
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size, member.linkname = kind, mode, len(data), link
    member.uid = member.gid = _OWNERS.get(name, 0)
    tar.addfile(member, io.BytesIO(data))


def _program() -> Path:
    found = shutil.which("busybox")
    if found is None:
        raise UnsupportedError(_FEATURE, "there is no busybox on this machine", _HINT)
    program = Path(found)
    if _is_dynamic(program.read_bytes()):
        raise UnsupportedError(_FEATURE, f"{found} is not a static 64-bit program", _HINT)
    return program


def _is_dynamic(elf: bytes) -> bool:
    """Whether it names a program interpreter (or is no 64-bit ELF): elf(5)."""
    if not elf.startswith(_ELF64):
        return True
    (offset,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    kinds = [struct.unpack_from("<I", elf, offset + size * n)[0] for n in range(count)]
    return _PT_INTERP in kinds
