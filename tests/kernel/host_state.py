"""What a test may leave on the host, as a set of names that two moments can be compared by."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from pyroute2 import IPRoute

from libhost import loop

_INTERFACE = re.compile(r"ds[pg]?[a-z0-9_]+")


def host_state() -> set[str]:
    return {*_cgroups(), *_mounts(), *_loops(), *_interfaces(), *_named_namespaces()}


def leaked(before: set[str], names: Iterable[str]) -> set[str]:
    """What is there now, was not before, and bears one of these names."""
    marks = tuple(names)
    return {item for item in host_state() - before if any(mark in item for mark in marks)}


def _cgroups() -> Iterable[str]:
    for hierarchy in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()):
        for top in hierarchy.glob("dsec*"):
            # Others' cgroups may go while we look; os.walk passes over what is gone.
            yield from (f"cgroup {directory}" for directory, _, _ in os.walk(top))


def _mounts() -> Iterable[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        yield f"mount {line.split()[4]}"


def _loops() -> Iterable[str]:
    yield from (f"loop device {device} of {image}" for device, image in loop.attached())


def _interfaces() -> Iterable[str]:
    with IPRoute() as ip:
        for link in ip.get_links():
            name = str(link.get_attr("IFLA_IFNAME"))
            if _INTERFACE.fullmatch(name):
                yield f"interface {name} of {link.get_attr('IFLA_IFALIAS')}"


def _named_namespaces() -> Iterable[str]:
    directory = Path("/run/netns")
    if directory.is_dir():
        yield from (f"netns {path.name}" for path in directory.glob("dsec*"))
