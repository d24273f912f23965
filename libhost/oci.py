"""The OCI configuration of a sandbox: what its first process may do and what it sees. Pure.

The sandbox has no user namespace: the wall is the node's own kernel. What confines root inside is
therefore all here: capabilities, the system call filter, and the parts of /proc and /sys that obey
uid 0 without asking for a capability.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from libhost import seccomp

# What installing packages, dropping privileges and serving a port takes. Not here on purpose:
# SYS_ADMIN, SYS_PTRACE, NET_RAW, NET_ADMIN, SYS_RESOURCE (ignores quotas), SYS_NICE, MKNOD,
# DAC_READ_SEARCH (opens by handle), LINUX_IMMUTABLE, AUDIT_WRITE.
CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_SETFCAP",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
)

# Readable or writable for uid 0 whatever its capabilities. A recursive read of kpagecgroup has
# brought kernels down; sysrq-trigger reboots the node.
_MASKED = (
    "/proc/kcore",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/sysrq-trigger",
    "/proc/keys",
    "/proc/timer_list",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/acpi",
    "/proc/asound",
    "/sys/firmware",
    "/sys/kernel",
    "/sys/fs",
    "/sys/devices/virtual/powercap",
)
_READ_ONLY = ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/mtrr")

# A limit of 0 lets a piped core handler of the host run all the same; 1 is the kernel's "never".
_CORE_NEVER = 1
_MEMLOCK_BYTES = 8 << 20
AGENT_FD = 5


@dataclass(frozen=True)
class ContainerSpec:
    """What differs between containers; ``agent_argv`` follows the agent's own flags."""

    hostname: str
    shm_mib: int = 64
    max_open_files: int = 65536
    env: Mapping[str, str] = field(default_factory=dict)
    agent_argv: Sequence[str] = ()


def build_config(spec: ContainerSpec, *, own_netns: bool) -> dict[str, object]:
    """The OCI configuration; ``own_netns``: the runtime makes one with only ``lo``."""
    namespaces = ["pid", "ipc", "uts", "mount", "cgroup"] + (["network"] if own_netns else [])
    return {
        "ociVersion": "1.0.2",
        "hostname": spec.hostname,
        "root": {"path": "rootfs", "readonly": False},
        "process": _process(spec),
        "mounts": _mounts(spec),
        "linux": {
            "namespaces": [{"type": kind} for kind in namespaces],
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
        },
        # crun takes the finished program; whoever starts it checks that it was put in force.
        "annotations": {
            "run.oci.seccomp_bpf_data": base64.b64encode(seccomp.compile_filter()).decode()
        },
    }


def _process(spec: ContainerSpec) -> dict[str, object]:
    agent = f"/proc/self/fd/{AGENT_FD}"
    sets = ("bounding", "effective", "permitted")
    limits = {
        "RLIMIT_NOFILE": spec.max_open_files,
        "RLIMIT_CORE": _CORE_NEVER,
        "RLIMIT_MEMLOCK": _MEMLOCK_BYTES,
    }
    return {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "cwd": "/",
        "args": [agent, "--listen-fd", "3", "--cgroup-fd", "4", *spec.agent_argv],
        "env": [f"{name}={value}" for name, value in spec.env.items()],
        # Empty inheritable and ambient sets: a program run as another user starts with nothing.
        "capabilities": {name: list(CAPABILITIES) for name in sets},
        "rlimits": [{"type": k, "hard": v, "soft": v} for k, v in limits.items()],
        # Not the edge's own protection: in a shortage of the host a sandbox goes first.
        "oomScoreAdj": 0,
        # sudo and su must work inside; the bounding set is the limit.
        "noNewPrivileges": False,
    }


def _mounts(spec: ContainerSpec) -> list[dict[str, object]]:
    safe = ["nosuid", "noexec", "nodev"]
    return [
        _mount("/proc", "proc", safe),
        _mount("/dev", "tmpfs", ["nosuid", "noexec", "strictatime", "mode=755", "size=1m"]),
        _mount(
            "/dev/pts",
            "devpts",
            ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        _mount("/dev/shm", "tmpfs", [*safe, "mode=1777", f"size={spec.shm_mib}m"]),  # noqa: S108 -- the sandbox's own
        _mount("/sys", "sysfs", [*safe, "ro"]),
    ]


def _mount(destination: str, kind: str, options: list[str]) -> dict[str, object]:
    return {"destination": destination, "type": kind, "source": kind, "options": options}
