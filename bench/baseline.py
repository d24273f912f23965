"""The bare runtime to measure against: `crun` on an already mounted root, nothing of DSec.

The commands run in a child that lives in a mount namespace of its own (crun refuses hybrid cgroup
hierarchies, so it sees a plain cgroup2 mount), and is asked over a pipe, so that baseline and
DSec alternate in one run.

Lifecycle: `with Baseline() as crun:` -> `crun.run()`, `crun.exec()`, `crun.burst(n, parallel)`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

SENTENCE = "dsec-bench"


class Baseline:
    """A child process that runs crun and reports seconds."""

    def __enter__(self) -> Baseline:
        self._dir = tempfile.TemporaryDirectory(prefix="dsec-bench-", dir="/var/tmp")
        self._child = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "--",
             sys.executable, "-m", "bench.baseline", self._dir.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._ask("ready", 0, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=60)
        self._dir.cleanup()

    def run(self) -> float:
        """Seconds of `crun run` until it printed its line and ended."""
        return self._ask("run", 1, 1)[0]

    def exec(self) -> float:
        """Seconds of `crun exec true` in a running container."""
        return self._ask("exec", 1, 1)[0]

    def burst(self, count: int, parallel: int) -> float:
        """Seconds until `count` containers started by `crun run -d`, `parallel` at once."""
        return self._ask("burst", count, parallel)[0]

    def _ask(self, what: str, count: int, parallel: int) -> list[float]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([what, count, parallel]) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the baseline's child ended; see its messages above")
        return list(json.loads(line))


def _config(root: Path, argv: list[str]) -> dict[str, object]:
    """The smallest honest OCI bundle: the same namespaces a sandbox has."""
    caps = ["CAP_CHOWN", "CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_DAC_OVERRIDE"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False, "user": {"uid": 0, "gid": 0}, "args": argv, "cwd": "/",
            "env": ["PATH=/bin:/usr/bin"],
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), caps),
        },
        "root": {"path": str(root), "readonly": False},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
        ],
        "linux": {"namespaces": [{"type": t} for t in ("pid", "ipc", "uts", "mount", "network")]},
    }  # fmt: skip


def _prepare(home: Path) -> dict[str, Path]:
    """A busybox root and one bundle per command."""
    root = home / "root"
    for folder in ("bin", "proc", "dev", "tmp", "etc"):
        (root / folder).mkdir(parents=True)
    busybox = "/usr/bin/busybox" if Path("/usr/bin/busybox").exists() else "/bin/busybox"
    (root / "bin/busybox").write_bytes(Path(busybox).read_bytes())
    (root / "bin/busybox").chmod(0o755)
    for name in ("sh", "echo", "true", "sleep"):
        (root / "bin" / name).symlink_to("busybox")
    bundles = {}
    for name, argv in (("echo", ["/bin/echo", SENTENCE]), ("sleep", ["/bin/sleep", "100000"])):
        bundles[name] = home / name
        bundles[name].mkdir()
        (bundles[name] / "config.json").write_text(json.dumps(_config(root, argv)))
    return bundles


class _Crun:
    def __init__(self, home: Path) -> None:
        subprocess.run(["mount", "-t", "cgroup2", "none", "/sys/fs/cgroup"], check=True)
        self._argv = ["crun", "--cgroup-manager=disabled", "--root", str(home / "state")]
        self._bundles = _prepare(home)
        self._count = 0
        self._run("run", "-d", "-b", str(self._bundles["sleep"]), "bench-exec")

    def _run(self, *argv: str) -> bytes:
        out = subprocess.PIPE if "-d" not in argv else subprocess.DEVNULL
        done = subprocess.run(
            [*self._argv, *argv], stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False
        )
        if done.returncode:
            raise RuntimeError(f"crun {' '.join(argv)}: {(done.stderr or b'').decode()}")
        return done.stdout or b""

    def _name(self) -> str:
        self._count += 1
        return f"bench-{self._count}"

    def run(self) -> float:
        begin = time.perf_counter()
        said = self._run("run", "-b", str(self._bundles["echo"]), self._name())
        took = time.perf_counter() - begin
        if said.strip() != SENTENCE.encode():
            raise RuntimeError(f"crun run printed {said!r}")
        return took

    def exec(self) -> float:
        begin = time.perf_counter()
        self._run("exec", "bench-exec", "/bin/true")
        return time.perf_counter() - begin

    def burst(self, count: int, parallel: int) -> float:
        names = [self._name() for _ in range(count)]
        with ThreadPoolExecutor(parallel) as pool:
            begin = time.perf_counter()
            list(
                pool.map(
                    lambda n: self._run("run", "-d", "-b", str(self._bundles["sleep"]), n), names
                )
            )
            took = time.perf_counter() - begin
            list(pool.map(self._delete, names))
        return took

    def answer(self, what: str, count: int, parallel: int) -> float:
        match what:
            case "run":
                return self.run()
            case "exec":
                return self.exec()
            case "burst":
                return self.burst(count, parallel)
        return 0.0  # "ready"

    def _delete(self, name: str) -> None:
        self._run("delete", "-f", name)

    def close(self) -> None:
        self._delete("bench-exec")


def _serve(home: Path) -> None:
    crun = _Crun(home)
    try:
        for line in sys.stdin:
            what, count, parallel = json.loads(line)
            print(json.dumps([crun.answer(what, count, parallel)]), flush=True)
    finally:
        crun.close()


if __name__ == "__main__":
    os.environ["LANG"] = "C.UTF-8"
    _serve(Path(sys.argv[1]))
