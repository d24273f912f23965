"""Where the programs run: the node's parent cgroup, and the host end of each sandbox's veth.

On the cgroup they are links pinned beside the maps: they stay when the process that made them is
killed, and a successor replaces their programs in place, one atomic store each.
On an interface they belong to the interface: attached as programs, not as links, they need no pin,
stay when the process is killed and go with the interface, so a sandbox leaves nothing behind.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from libhost.bpf import libbpf
from libhost.bpf.libbpf import BpfObject
from libhost.errors import UnsupportedError

# enum bpf_attach_type; the tcx ones are newer than the oldest headers built against.
CGROUP_PROGRAMS: Final = {
    "on_ingress": 0,
    "on_egress": 1,
    "on_socket": 2,
    "on_connect4": 10,
    "on_connect6": 11,
    "on_sendmsg4": 14,
    "on_sendmsg6": 15,
}
_TCX_INGRESS: Final = 46
_TCX_EGRESS: Final = 47
_F_REPLACE: Final = 1 << 2
_F_BEFORE: Final = 1 << 3
_TC_INGRESS: Final = 1
_TC_EGRESS: Final = 2
_LOOPBACK_IFINDEX: Final = 1

_PROG_ID: Final = struct.Struct("=4xI")
_PROG_NAME: Final = struct.Struct("=64x16s")
_LINK_CGROUP: Final = struct.Struct("=16xQ")


class LinkMechanism(Enum):
    """How a program gets onto an interface; tcx needs Linux 6.6."""

    TCX = "tcx"
    CLSACT = "clsact"


def _program_id(fd: int) -> int:
    (value,) = _PROG_ID.unpack(libbpf.info(fd, _PROG_ID.size, "program"))
    return int(value)


def probe_link_mechanism() -> LinkMechanism:
    """Asks what is attached to the loopback interface: an older kernel does not know the word."""
    try:
        libbpf.prog_query(_LOOPBACK_IFINDEX, _TCX_INGRESS, "tcx on loopback")
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
        return LinkMechanism.CLSACT
    return LinkMechanism.TCX


def attach_to_cgroup(bpf: BpfObject, cgroup: Path, pins: Path) -> int:
    """Put the object's cgroup programs in force; earlier ones are replaced without a gap.

    Returns the cgroup's id: a directory of the same name that is made later has another.
    """
    target = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        cgroup_id = os.fstat(target).st_ino
        for name, attach_type in CGROUP_PROGRAMS.items():
            pin = pins / f"link_{name}"
            if not _replace_pinned(pin, bpf.program_fd(name), cgroup_id):
                _pin_new_link(pin, bpf.program_fd(name), target, attach_type)
        return cgroup_id
    finally:
        os.close(target)


def _replace_pinned(pin: Path, program_fd: int, cgroup_id: int) -> bool:
    """False if there is no link, or one of a cgroup that was removed since."""
    if not pin.exists():
        return False
    link = libbpf.obj_get(str(pin))
    try:
        (attached,) = _LINK_CGROUP.unpack(libbpf.info(link, _LINK_CGROUP.size, str(pin)))
        if attached != cgroup_id:
            pin.unlink()
            return False
        libbpf.link_update(link, program_fd, str(pin))
        return True
    finally:
        os.close(link)


def _pin_new_link(pin: Path, program_fd: int, target: int, attach_type: int) -> None:
    try:
        link = libbpf.link_create(program_fd, target, attach_type, pin.name)
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP):
            raise
        raise UnsupportedError("network policy", f"{pin.name}: {err.strerror}") from err
    try:
        libbpf.obj_pin(link, str(pin))
    finally:
        os.close(link)


@dataclass(frozen=True)
class LinkHook:
    """The two programs of a sandbox's link. Named from the sandbox: ``out`` is what it sends."""

    out_fd: int
    in_fd: int
    mechanism: LinkMechanism

    @classmethod
    def of(cls, bpf: BpfObject, mechanism: LinkMechanism) -> LinkHook:
        return cls(bpf.program_fd("on_link_out"), bpf.program_fd("on_link_in"), mechanism)

    def attach(self, ifindex: int) -> None:
        """Idempotent; programs of an earlier version are replaced without a gap.

        Raises OSError ENODEV if the interface is not in this process's network namespace.
        """
        subject = f"interface {ifindex}"
        if self.mechanism is LinkMechanism.CLSACT:
            libbpf.tc_attach(self.out_fd, ifindex, _TC_INGRESS, subject)
            libbpf.tc_attach(self.in_fd, ifindex, _TC_EGRESS, subject)
            return
        _attach_tcx(self.out_fd, "on_link_out", ifindex, _TCX_INGRESS, subject)
        _attach_tcx(self.in_fd, "on_link_in", ifindex, _TCX_EGRESS, subject)


def _attach_tcx(program_fd: int, name: str, ifindex: int, attach_type: int, subject: str) -> None:
    wanted = _program_id(program_fd)
    for program_id in libbpf.prog_query(ifindex, attach_type, subject):
        if program_id == wanted:
            return
        earlier = libbpf.program_fd_by_id(program_id)
        try:
            (found,) = _PROG_NAME.unpack(libbpf.info(earlier, _PROG_NAME.size, subject))
            if found.rstrip(b"\0").decode() == name:
                libbpf.prog_attach(program_fd, ifindex, attach_type, _F_REPLACE, earlier, subject)
                return
        finally:
            os.close(earlier)
    # First in the row: a program that ran before could let a packet pass unseen.
    libbpf.prog_attach(program_fd, ifindex, attach_type, _F_BEFORE, 0, subject)
