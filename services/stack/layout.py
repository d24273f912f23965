"""Where a stack keeps its files: all of it below one directory.

<home>/users.toml          principals, their projects and passwords (0600)
<home>/aliases.toml        the operator's network aliases, read by the policy service
<home>/context.toml        what a bare DSecClient() reads
<home>/stack.json          ports and node names: the same at every start
<home>/secrets/<user>      one password a file, for the services (0600)
<home>/nats/               hub.conf, leaf-<node>.conf, JetStream's store
<home>/valkey/             socket and data
<home>/layers/             the layer store
<home>/nodes/<node>/       an edge's state: journal, sandboxes, disks
<home>/run/                what means nothing after a reboot: sockets, pins, process list
<home>/log/<process>.log
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StackPaths:
    """The paths of one stack, derived from its home."""

    home: Path

    @property
    def users(self) -> Path:
        return self.home / "users.toml"

    @property
    def aliases(self) -> Path:
        return self.home / "aliases.toml"

    @property
    def context(self) -> Path:
        return self.home / "context.toml"

    @property
    def description(self) -> Path:
        return self.home / "stack.json"

    @property
    def nats(self) -> Path:
        return self.home / "nats"

    @property
    def valkey(self) -> Path:
        return self.home / "valkey"

    @property
    def layers(self) -> Path:
        return self.home / "layers"

    @property
    def run(self) -> Path:
        return self.home / "run"

    @property
    def log(self) -> Path:
        return self.home / "log"

    @property
    def processes(self) -> Path:
        """Who runs: name, pid, start time. What a new supervisor adopts from."""
        return self.run / "processes.json"

    @property
    def control(self) -> Path:
        """The supervisor's socket."""
        return self.run / "stack.sock"

    def secret(self, user: str) -> Path:
        return self.home / "secrets" / user

    def node_state(self, node: str) -> Path:
        return self.home / "nodes" / node

    def node_run(self, node: str) -> Path:
        return self.run / node

    def make(self) -> None:
        """Create the directories; the home is for its owner alone, since it holds passwords."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        for path in (self.nats, self.valkey, self.layers, self.run, self.log,
                     self.home / "secrets", self.home / "nodes"):  # fmt: skip
            path.mkdir(exist_ok=True, mode=0o700)
