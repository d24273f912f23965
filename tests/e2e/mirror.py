"""A server on the node's side of the sandboxes' network, as an operator's mirror would be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GATEWAY = "169.254.77.1"


@dataclass(frozen=True)
class Mirror:
    """`allowed` is behind the alias `pypi`, `other` is behind none."""

    allowed: int
    other: int

    @property
    def aliases(self) -> str:
        return (
            f'[services.pypi]\nrules = ["tcp:{GATEWAY}:{self.allowed}"]\n'
            f'env = {{ INDEX = "http://{GATEWAY}:{self.allowed}/" }}\n'
            f'hosts = {{ "mirror.test" = "{GATEWAY}" }}\n'
            f'[services.npm]\nrules = ["tcp:{GATEWAY}:{self.other}"]\n'
        )


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"hello {self.client_address[0]}\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Into no test's output."""


@contextmanager
def serving() -> Iterator[Mirror]:
    """Two servers at the gateway's address, which is there as soon as a node is."""
    servers = [ThreadingHTTPServer((GATEWAY, 0), _Page) for _ in range(2)]
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield Mirror(servers[0].server_port, servers[1].server_port)
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()
