"""Real sandboxes for the agent's tests, as small as they can be: no libhost, no image, no network.

``plain`` is the agent in a pid namespace of its own over the host's files; ``container`` is a crun
container over a busybox tree, started the way an edge does it (sealed memfd, inherited socket and
cgroup descriptor).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BINARY = REPOSITORY / "build" / "aether"
AGENT_CAPS = [
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "AUDIT_WRITE", "SETFCAP"),
]


@dataclass(frozen=True)
class AgentSandbox:
    socket: Path
    cgroup: Path
    root: Path
    pid: int  # of the agent, on the host

    def pids(self) -> list[int]:
        """Everything below the sandbox's cgroup, as the host sees it."""
        files = [self.cgroup, *self.cgroup.glob("aether*")]
        return [int(pid) for at in files for pid in (at / "cgroup.procs").read_text().split()]

    def leaf_pids(self) -> list[int]:
        leaves = self.cgroup.glob("aether*")
        return [int(pid) for at in leaves for pid in (at / "cgroup.procs").read_text().split()]

    def rss_kib(self) -> int:
        return self._status("VmRSS")

    def _status(self, field: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
        raise LookupError(field)


def require_binary(name: str = "aether", target: str = "") -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    subprocess.run(["make", "-s", "-C", REPOSITORY / "aether", *target.split()], check=True)
    return BINARY.with_name(name)


def cgroup2_mount() -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    pytest.skip("no cgroup2 is mounted")


@contextlib.contextmanager
def limited(controller: str, settings: dict[str, int]) -> Iterator[Path]:
    """A cgroup of a version 1 controller, where the host has that; skips elsewhere."""
    parent = Path("/sys/fs/cgroup") / controller
    if not (parent / "cgroup.procs").exists() or not (parent / "tasks").exists():
        pytest.skip(f"no version 1 {controller} controller")
    path = parent / f"dsec-t{secrets.token_hex(4)}"
    path.mkdir()
    try:
        for name, value in settings.items():
            (path / name).write_text(str(value))
        yield path
    finally:
        _remove_cgroup(path)


@contextlib.contextmanager
def new_cgroup() -> Iterator[Path]:
    path = cgroup2_mount() / f"dsec-t{secrets.token_hex(4)}"
    path.mkdir()
    try:
        yield path
    finally:
        (path / "cgroup.kill").write_text("1")
        for leaf in path.glob("aether*"):
            _remove_cgroup(leaf)
        _remove_cgroup(path)


def _remove_cgroup(path: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            path.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen(16)
    return sock


def sealed_memfd(binary: Path) -> int:
    fd = os.memfd_create("agent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, binary.read_bytes())
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


# Joins the cgroups, puts the descriptors where the agent expects them, becomes the command.
_LAUNCH = """
for cgroup in $CGROUPS; do echo 0 > "$cgroup/cgroup.procs" || exit 1; done
exec 3<&"$LISTEN" 4<&"$CGROUP" 5<&"$MEMFD"
exec "$@"
"""


@contextlib.contextmanager
def plain(
    where: Path,
    *,
    binary: Path = BINARY,
    arguments: tuple[str, ...] = ("--cgroup-fd", "4"),
    joined: tuple[Path, ...] = (),
) -> Iterator[AgentSandbox]:
    agent = [str(binary), "--listen-fd", "3", *arguments]
    with new_cgroup() as cgroup, _launched(where, cgroup, binary, joined) as launch:
        process = launch(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *agent])
        try:
            yield AgentSandbox(where / "s", cgroup, Path("/"), _agent_pid(process, cgroup))
        finally:
            process.kill()
            process.wait(10)


@contextlib.contextmanager
def container(
    where: Path,
    *,
    binary: Path = BINARY,
    arguments: tuple[str, ...] = ("--cgroup-fd", "4"),
    joined: tuple[Path, ...] = (),
    empty: bool = False,
    refused_calls: tuple[str, ...] = (),
) -> Iterator[AgentSandbox]:
    if shutil.which("crun") is None:
        pytest.skip("needs crun")
    root = where / "root"
    root.mkdir()
    if not empty:
        _fill_root(root)
    _add_libraries(root, binary)
    (where / "config.json").write_text(json.dumps(_config(root, arguments, refused_calls)))
    name = f"dsec-t{secrets.token_hex(4)}"
    # crun refuses hybrid cgroups; with only a unified one in view and no manager it asks nothing.
    prepare = "mount --make-rprivate / && mount -t cgroup2 none /sys/fs/cgroup && exec "
    run = (
        f"crun --root {where}/crun --cgroup-manager=disabled run --preserve-fds=3 -b {where} {name}"
    )
    with new_cgroup() as cgroup, _launched(where, cgroup, binary, joined) as launch:
        process = launch(["unshare", "--mount", "sh", "-c", prepare + run])
        try:
            yield AgentSandbox(where / "s", cgroup, root, _agent_pid(process, cgroup))
        finally:
            (cgroup / "cgroup.kill").write_text("1")
            process.wait(10)
            shutil.rmtree(where / "crun", ignore_errors=True)


@contextlib.contextmanager
def _launched(where: Path, cgroup: Path, binary: Path, joined: tuple[Path, ...]):
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listening(where / "s"))
        cgroup_fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, cgroup_fd)
        memfd = sealed_memfd(binary)
        stack.callback(os.close, memfd)
        environment = {
            **os.environ,
            "CGROUPS": " ".join(str(path) for path in (cgroup, *joined)),
            "LISTEN": str(sock.fileno()),
            "CGROUP": str(cgroup_fd),
            "MEMFD": str(memfd),
        }

        def launch(command: list[str]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                ["bash", "-c", _LAUNCH, "launch", *command],
                env=environment,
                pass_fds=(sock.fileno(), cgroup_fd, memfd),
                stdin=subprocess.DEVNULL,
            )

        yield launch


def _agent_pid(process: subprocess.Popen[bytes], cgroup: Path) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        for pid in (cgroup / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "aether\n":
                    return int(pid)
        time.sleep(0.002)
    raise AssertionError(f"the agent did not start (status {process.poll()})")


def _fill_root(root: Path) -> None:
    busybox = shutil.which("busybox") or pytest.skip("needs busybox-static")
    for directory in ("bin", "etc", "tmp", "home/alice", "proc", "dev"):
        (root / directory).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    shutil.copy(busybox, root / "bin" / "busybox")
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    for applet in applets.stdout.split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "etc" / "passwd").write_text(
        "# people\nroot:x:0:0:root:/root:/bin/sh\nshort:line\n"
        "alice:x:1000:1000::/home/alice:/bin/sh\n"
    )
    (root / "etc" / "group").write_text(
        "root:x:0:\nalice:x:1000:\nstaff:x:50:bob,alice\nwheel:x:10:alicexx\nvideo:x:44:alice\n"
    )
    os.chown(root / "home" / "alice", 1000, 1000)


def install(sandbox: AgentSandbox, name: str, source: str) -> None:
    """A C program as /bin/NAME of the sandbox."""
    target = sandbox.root / "bin" / name
    command = ["gcc", "-static", "-O1", "-x", "c", "-o", str(target), "-"]
    subprocess.run(command, input=source, text=True, check=True)


def _add_libraries(root: Path, binary: Path) -> None:
    """What a dynamic build of the agent needs; the real one is static."""
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True)
    for path in re.findall(r"(/\S+) \(0x", listed.stdout):
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def _config(
    root: Path, arguments: tuple[str, ...], refused_calls: tuple[str, ...]
) -> dict[str, object]:
    hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    caps = [f"CAP_{cap}" for cap in AGENT_CAPS]
    return {
        "ociVersion": "1.0.0",
        "root": {"path": str(root)},
        "process": {
            "args": ["/proc/self/fd/5", "--listen-fd", "3", *arguments],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), caps),
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 1024, "hard": hard_files}],
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
            {"destination": "/small", "type": "tmpfs", "source": "t", "options": ["size=1m"]},
        ],
        "linux": {
            "seccomp": {
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [
                    {"names": [name], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS}
                    for name in refused_calls
                ],
            },
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")],
        },
    }
