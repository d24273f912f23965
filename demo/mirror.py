"""Two small web servers at the node's gateway: a package mirror, and one to stay out of reach.

The mirror is what the alias `pypi` names in this stack. The other one answers everybody who gets
through to it, so that a refusal can only be the policy's doing.
"""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """The demo's own output is a table, not an access log."""


def serve(folder: Path, address: str, port: int) -> ThreadingHTTPServer:
    """Serve `folder` from a thread until `shutdown()`; port 0 takes a free one."""
    server = ThreadingHTTPServer((address, port), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, name=f"http-{port}", daemon=True).start()
    return server


def build_index(folder: Path, distribution: Path) -> None:
    """A simple-repository index with one project in it."""
    name = distribution.name.partition("-")[0]
    project = folder / "simple" / name
    project.mkdir(parents=True, exist_ok=True)
    (project / distribution.name).write_bytes(distribution.read_bytes())
    link = f'<!DOCTYPE html><a href="{distribution.name}">{distribution.name}</a>'
    (project / "index.html").write_text(link)
    (folder / "simple" / "index.html").write_text(f'<!DOCTYPE html><a href="{name}/">{name}</a>')
