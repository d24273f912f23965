"""The echo service as a process, seen from outside."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class EchoProcess:
    """The echo service as a process."""

    def __init__(self, directory: Path, nats_url: str) -> None:
        self.port_file = directory / "port"
        self.log_file = directory / "echo.log"
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "DSEC_NATS_SERVERS": json.dumps([nats_url]),
            "DSEC_HTTP_PORT": "0",
            "DSEC_HTTP_PORT_FILE": str(self.port_file),
            "DSEC_DRAIN_TIMEOUT_S": "5",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.echo_service"],
                env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    async def until_ready(self, ready: bool = True) -> None:
        async with asyncio.timeout(15):
            while (await self.get("/readyz"))[0] != (200 if ready else 503):
                await asyncio.sleep(0.02)

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(self._get, path)

    def _get(self, path: str) -> tuple[int, str]:
        try:
            url = f"http://127.0.0.1:{self.port_file.read_text()}{path}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as err:
            return err.code, err.read().decode()
        except (OSError, ValueError):
            return 0, ""

    async def ended(self) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, 15)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]
