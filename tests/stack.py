"""A stack of a test's own, driven by the commands an operator has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from services.stack.description import StackDescription, load
from services.stack.layout import StackPaths

DSEC = str(Path(sys.executable).parent / "dsec")
IMAGE = "public/busybox"
SMALL = {"cpus": 0.2, "memory_mib": 64, "disk_mib": 64, "pids": 64}


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    home: Path
    nodes: int = 2

    @property
    def paths(self) -> StackPaths:
        return StackPaths(self.home)

    @property
    def context(self) -> Path:
        return self.home / "context.toml"

    @property
    def operator_context(self) -> Path:
        return self.home / "operator.toml"

    @cached_property
    def description(self) -> StackDescription:
        found = load(self.paths)
        assert found is not None, f"{self.home} was never up"
        return found

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.description.nodes)

    def dsec(
        self, *argv: str, context: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        full = {**os.environ, "DSEC_CONTEXT": str(context or self.context), **(env or {})}
        return subprocess.run(
            [DSEC, *argv], env=full, capture_output=True, text=True, timeout=180, check=False
        )

    def dsec_json(self, *argv: str, context: Path | None = None) -> object:
        """What a command that must work says as JSON."""
        done = self.dsec(*argv, "--json", context=context)
        assert done.returncode == 0, f"dsec {' '.join(argv)}: {done.stderr}"
        return json.loads(done.stdout)

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

    def write_aliases(self, text: str) -> None:
        """As an editor does: whole or not at all."""
        written = self.home / "aliases.toml.new"
        written.write_text(text)
        written.replace(self.paths.aliases)


@contextmanager
def running_stack(nodes: int = 2, prefix: str = "dsec-e2e-") -> Iterator[Stack]:
    """A stack in a directory of its own; down and removed at the end, whatever happened."""
    stack = Stack(Path(tempfile.mkdtemp(prefix=prefix, dir="/var/lib")), nodes)
    try:
        stack.up()
        yield stack
    finally:
        stack.down()
        shutil.rmtree(stack.home)
