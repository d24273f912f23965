"""`dsec doctor`: what this machine lacks to run DSec, and the way out, one line each."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from libhost.probe import probe_host

from .plan import PARTS, binary, built, valkey_binary

BUILD = "make setup in a checkout builds it into build/; elsewhere it belongs into /usr/lib/dsec"
_KERNEL = (6, 12)
_PROGRAMS = {
    "crun": "crun",
    "mkfs.erofs": "erofs-utils",
    "fsck.erofs": "erofs-utils",
    "mkfs.ext4": "e2fsprogs",
    "busybox": "busybox-static",
    "mmdebstrap": "mmdebstrap",
}


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    detail: str
    hint: str = ""
    needed: bool = True


def examine(state_dir: Path) -> Iterator[Check]:
    """Every check, cheapest first; what needs root is left out without it."""
    root = os.geteuid() == 0
    yield Check("root", root, f"uid {os.geteuid()}", "edges need root: run as root, or use a stack "
                "that somebody else runs with a credentials file")  # fmt: skip
    yield _kernel()
    yield from _programs()
    yield from _binaries()
    yield from _parts()
    if root:
        yield from _probes(state_dir)


def _kernel() -> Check:
    release = platform.release()
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = tuple(map(int, numbers.groups())) if numbers else (0, 0)
    hint = f"DSec mounts EROFS images from files: Linux {_KERNEL[0]}.{_KERNEL[1]} or newer"
    return Check("kernel", version >= _KERNEL, release, hint)


def _programs() -> Iterator[Check]:
    for program, package in _PROGRAMS.items():
        path = shutil.which(program, path=f"{os.defpath}:/usr/sbin:/sbin:/usr/bin:/bin")
        optional = program in {"mmdebstrap", "busybox"}
        yield Check(program, path is not None, path or "not found",
                    f"apt-get install {package}", needed=not optional)  # fmt: skip


def _binaries() -> Iterator[Check]:
    programs: dict[str, Callable[[], str]] = {
        "nats-server": lambda: binary("nats-server"),
        "valkey": valkey_binary,
    }
    for name, find in programs.items():
        try:
            yield Check(name, True, find())
        except (FileNotFoundError, ImportError) as err:
            yield Check(name, False, str(err), "pip install 'libdsec[services]'")


def _parts() -> Iterator[Check]:
    """What is compiled by us, and is not in the wheel."""
    for path in map(built, PARTS):
        found = str(path) if path.exists() else f"{path} does not exist"
        yield Check(path.name, path.exists(), found, BUILD)


def _probes(state_dir: Path) -> Iterator[Check]:
    state_dir.mkdir(parents=True, exist_ok=True)
    found = probe_host(state_dir)
    for problem in found.problems:
        yield Check("host", False, problem)
    yield Check("cgroups", found.cgroups is not None, found.cgroups_reason)
    yield Check("overlay", found.overlay is not None, found.overlay_reason)
    yield Check("disk limit", found.disk is not None, found.disk_reason)
    for name in ("erofs_file", "cgroup_kill"):
        finding = getattr(found, name)
        yield Check(name.replace("_", " "), finding.ok, finding.reason)
    for name in ("memory_reclaim", "process_madvise", "swap", "core_scheduling", "pressure"):
        finding = getattr(found, name)
        yield Check(name.replace("_", " "), finding.ok, finding.reason, needed=False)
