"""A stack of a test's own, driven by the commands an operator has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DSEC = str(Path(sys.executable).parent / "dsec")
IMAGE = "public/busybox"
SMALL = {"cpus": 0.2, "memory_mib": 64, "disk_mib": 64, "pids": 64}


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    home: Path
    nodes: int = 2

    @property
    def context(self) -> Path:
        return self.home / "context.toml"

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{i + 1}" for i in range(self.nodes))

    def dsec(self, *argv: str, context: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "DSEC_CONTEXT": str(context or self.context)}
        return subprocess.run(
            [DSEC, *argv], env=env, capture_output=True, text=True, timeout=180, check=False
        )

    def up(self) -> None:
        self._must("up", "--home", str(self.home), "--nodes", str(self.nodes))

    def down(self) -> None:
        self._must("down", "--home", str(self.home))

    def _must(self, *argv: str) -> None:
        done = self.dsec(*argv)
        if done.returncode:
            raise RuntimeError(f"dsec {' '.join(argv)}: {done.stderr}")

    def add_user(self, name: str, project: str) -> Path:
        """As an operator does: a table in users.toml, and `dsec up` again. Returns its context."""
        users = self.home / "users.toml"
        text = users.read_text()
        if f"[users.{name}]" not in text:
            table = f'role = "caller"\nproject = "{project}"\npassword = "{name}-password"\n'
            users.write_text(f"{text}\n[users.{name}]\n{table}")
            self.up()
        return self.home / f"{name}.toml"


@contextmanager
def running_stack(nodes: int = 2) -> Iterator[Stack]:
    """A stack in a directory of its own; down and removed at the end, whatever happened."""
    stack = Stack(Path(tempfile.mkdtemp(prefix="dsec-test-", dir="/var/lib")), nodes)
    try:
        stack.up()
        yield stack
    finally:
        stack.down()
        shutil.rmtree(stack.home)
