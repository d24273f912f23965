"""Ending a sandbox's flows that its rules no longer allow.

A packet filter only makes a flow stall: the program inside waits for its own timeout. Destroying
the socket (the kernel's SOCK_DESTROY, what ``ss -K`` uses) gives it ECONNABORTED at once. That is
asked for inside the sandbox's network namespace, which only a child of ours enters. The peer
outside is not told: the reset the kernel sends goes by the new rules too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libhost import command
from libhost.bpf.rule import Rule

_CHILD: Final = Path(__file__).with_name("flow_child.py")
_RULES_FD: Final = 3


@dataclass(frozen=True)
class EndedFlows:
    """``refused``: the kernel cannot (CONFIG_INET_DIAG_DESTROY is off), these only stall."""

    ended: int
    refused: int


def end_flows(netns: Path, allowed: Collection[Rule], *, timeout_s: float) -> EndedFlows:
    """End every connected TCP and UDP flow in ``netns`` whose peer no rule allows.

    Flows within the namespace itself are left alone. Raises ValueError if it is the caller's own
    namespace, FileNotFoundError if it is gone, CommandFailedError or TimeoutError.
    """
    if netns.stat().st_ino == Path("/proc/thread-self/ns/net").stat().st_ino:
        raise ValueError(f"{netns} is this host's own network namespace")
    rules = [(int(r.protocol), str(r.network), r.port, r.allow) for r in allowed]
    fd = os.memfd_create("rules", os.MFD_CLOEXEC)
    try:
        os.write(fd, json.dumps(rules).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        argv = ["nsenter", f"--net={netns}", sys.executable, "-IS", str(_CHILD)]
        done = command.run(argv, timeout_s=timeout_s, fds={_RULES_FD: fd})
    finally:
        os.close(fd)
    return EndedFlows(**json.loads(done.stdout))
