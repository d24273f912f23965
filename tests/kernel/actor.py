"""A process in a network namespace (and, for a sandbox, a cgroup) of its own, told what to do.

Run as a program: ``actor.py [cgroup]``. It makes its namespace, joins the cgroup, prints a line and
then answers one JSON request per line: ``[name, {arguments}]`` -> a JSON value. What fails with an
errno answers ``"E..."``, so that a test can assert which one.
"""

from __future__ import annotations

import ctypes
import errno
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000


class Actor:
    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self._seen: list[str] = []

    def run(self, *, argv: list[str]) -> str:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10)
        return done.stdout if done.returncode == 0 else f"failed: {done.stderr}"

    def enter(self, *, pid: int, tid: int = 0) -> None:
        """Move into the network namespace of another process, or of one thread of it."""
        with Path(f"/proc/{pid}/task/{tid or pid}/ns/net").open() as namespace:
            if LIBC.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def sysctl(self, *, name: str, value: str) -> None:
        Path("/proc/sys", name).write_text(value)

    def serve(self, *, kind: str, address: str, port: int) -> None:
        """Echo, upper-cased; every request is remembered for ``seen``."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if kind == "udp":
            sock = socket.socket(family, socket.SOCK_DGRAM)
            sock.bind((address, port))
            threading.Thread(target=self._serve_udp, args=[sock], daemon=True).start()
        else:
            sock = socket.create_server((address, port), family=family, backlog=256)
            threading.Thread(target=self._accept, args=[sock], daemon=True).start()

    def _serve_udp(self, sock: socket.socket) -> None:
        """``big`` is answered with more than fits into one frame."""
        while True:
            data, peer = sock.recvfrom(65535)
            self._seen.append(data.decode()[:100])
            sock.sendto(b"BIG" * 2000 if data == b"big" else data.upper(), peer)

    def _accept(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=self._echo, args=[connection], daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65536):
                self._seen.append(data.decode()[:100])
                connection.sendall(data.upper())

    def sniff(self, *, interface: str) -> None:
        """Remember every IPv4 or IPv6 frame that arrives, as hex, for ``seen``."""
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        sock.bind((interface, 0))

        def watch() -> None:
            while True:
                frame = sock.recv(65535)
                if frame[12:14] in (b"\x08\x00", b"\x86\xdd"):
                    self._seen.append(frame.hex())

        threading.Thread(target=watch, daemon=True).start()

    def seen(self) -> list[str]:
        return list(self._seen)

    def connect(
        self,
        *,
        address: str,
        port: int,
        timeout_s: float = 1.0,
        source: str = "",
        source_port: int = 0,
    ) -> int:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.settimeout(timeout_s)
        if source_port:
            sock.bind((source, source_port))
        sock.connect((address, port))
        self._sockets[sock.fileno()] = sock
        return sock.fileno()

    def connect_udp(self, *, address: str, port: int) -> int:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.connect((address, port))
        self._sockets[sock.fileno()] = sock
        return sock.fileno()

    def refused(self, *, peers: list[tuple[str, int]]) -> list[bool]:
        """Whether each may not even be named as a datagram's peer; nothing is sent."""
        answers = []
        for address, port in peers:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                answers.append(sock.connect_ex((address, port)) == errno.EPERM)
        return answers

    def talk(self, *, handle: int, text: str, timeout_s: float = 1.0) -> str:
        sock = self._sockets[handle]
        sock.settimeout(timeout_s)
        sock.sendall(text.encode())
        return sock.recv(65536).decode()

    def read(self, *, handle: int, timeout_s: float = 1.0) -> str:
        sock = self._sockets[handle]
        sock.settimeout(timeout_s)
        return sock.recv(65536).decode()

    def close(self, *, handle: int) -> None:
        self._sockets.pop(handle).close()

    def udp(self, *, address: str, port: int, text: str, timeout_s: float = 1.0) -> str:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.settimeout(timeout_s)
            sock.sendto(text.encode(), (address, port))
            return sock.recv(65536).decode()

    def udp_send(self, *, address: str, port: int, text: str, source_port: int = 0) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("", source_port))
            sock.sendto(text.encode(), (address, port))

    def socket(self, *, family: int, kind: int, protocol: int = 0) -> str:
        socket.socket(family, kind, protocol).close()
        return "ok"

    def packet(self, *, interface: str, frame: str) -> str:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
            sock.bind((interface, 0))
            sock.send(bytes.fromhex(frame))
        return "ok"

    def hammer(self, *, address: str, port: int, count: int) -> dict[str, int]:
        """``count`` connections, one after the other, each with one exchange."""
        outcome: dict[str, int] = {}
        for _ in range(count):
            try:
                handle = self.connect(address=address, port=port, timeout_s=5)
                result = self.talk(handle=handle, text="x", timeout_s=5)
                self.close(handle=handle)
            except OSError as err:
                result = name_of(err)
            outcome[result] = outcome.get(result, 0) + 1
        return outcome


def name_of(err: OSError) -> str:
    if isinstance(err, TimeoutError):
        return "ETIMEDOUT"
    return errno.errorcode.get(err.errno or 0, repr(err))


def answer(actor: Actor, line: str) -> Any:
    name, arguments = json.loads(line)
    try:
        return getattr(actor, name)(**arguments)
    except OSError as err:
        return name_of(err)


def main() -> None:
    if LIBC.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for cgroup in sys.argv[1:]:
        Path(cgroup, "cgroup.procs").write_text("0")
    actor = Actor()
    actor.run(argv=["ip", "link", "set", "lo", "up"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(actor, line)), flush=True)


if __name__ == "__main__":
    main()
