"""What DSec can leave on a host, as a set to compare before and after."""

from __future__ import annotations

import os
from pathlib import Path


def on_this_host() -> set[str]:
    """Cgroups, mounts, interfaces, loop devices, pins and processes that carry our names."""
    return {
        *cgroups(),
        *(f"mount {line}" for line in mounts()),
        *(f"interface {name}" for name in interfaces()),
        *(f"loop {name}" for name in loops()),
        *(f"pin {path}" for path in Path("/sys/fs/bpf").glob("dsec*")),
        *(f"process {line}" for line in processes()),
    }


def cgroups() -> set[str]:
    root = Path("/sys/fs/cgroup")
    return {f"cgroup {p}" for pattern in ("dsec-*", "*/dsec-*") for p in root.glob(pattern)}


def mounts() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split()[4] for line in lines if "dsec" in line}


def interfaces() -> set[str]:
    names = [p.name for p in Path("/sys/class/net").iterdir()]
    return {n for n in names if n.startswith(("dsg", "dsec")) or (n[:2] == "ds" and len(n) == 12)}


def loops() -> set[str]:
    found = set()
    for device in Path("/sys/block").glob("loop*"):
        backing = device / "loop" / "backing_file"
        if backing.exists():
            found.add(f"{device.name} {backing.read_text().strip()}")
    return found


def processes() -> set[str]:
    """Processes of a stack: our services, their servers, and agents."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            argv = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        text = b" ".join(argv).decode(errors="replace")
        if "-m services." in text or ("--listen-fd" in text) or "/dsec-" in text.partition(" ")[2]:
            found.add(f"{entry.name} {text.strip()[:120]}")
    return found
