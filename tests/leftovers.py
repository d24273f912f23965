"""What a stack can leave on a host: everything there that carries its home or its nodes' names.

Looked for by the names on the host and not by asking any part of DSec, which might have forgotten.
Other stacks' things do not count, so this holds on a host that runs several.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.kernel.host_state import host_state
from tests.stack import Stack

# What the kernel takes down by itself when its last user is gone, it takes down a little later.
_GRACE_S = 5.0


def left_on_host(stack: Stack) -> list[str]:
    """What is left of a stack that was taken down; empty is the promise."""
    marks = (str(stack.home), *(f"dsec-{name}" for name in stack.node_names))
    end = time.monotonic() + _GRACE_S
    while True:
        found = [
            item
            for item in (*host_state(), *_pins(), *_swaps(), *_processes(marks))
            if any(mark in item for mark in marks)
        ]
        if not found or time.monotonic() > end:
            return sorted(found)
        time.sleep(0.05)


def _pins() -> Iterator[str]:
    yield from (f"pin {path}" for path in Path("/sys/fs/bpf").glob("dsec*"))


def _swaps() -> Iterator[str]:
    for line in Path("/proc/swaps").read_text().splitlines()[1:]:
        yield f"swap {line.split()[0]}"


def _processes(marks: Iterable[str]) -> Iterator[str]:
    """Processes that have one of the marks in their command line, environment or cgroup."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            argv, environment, cgroup = (
                (entry / name).read_bytes().decode(errors="replace").replace("\0", " ")
                for name in ("cmdline", "environ", "cgroup")
            )
        except OSError:  # it ended while we looked
            continue
        told = f"{argv} {environment} {cgroup}"
        found = next((mark for mark in marks if mark in told), None)
        if found:
            yield f"process {entry.name} {argv[:100]} of {found}"
