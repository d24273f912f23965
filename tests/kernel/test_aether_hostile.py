"""Broken edges, and root inside the sandbox: neither makes PID 1 do anything but its work.

The fuzzing runs against a build with sanitizers, where a wrong read or an overflow ends the
process, and always in a container: a request altered by chance may well remove something.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.edge.agent import AgentChannel, ExecSpec, codec
from services.edge.agent.model import ExecSpec as Spec
from services.edge.agent.protocol import MAX_PAYLOAD, AttachFlag, FileOp, FrameType
from tests.kernel.aether_sandbox import AgentSandbox, container, install, plain, require_binary

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentSandbox]:
    binary = require_binary("aether-asan", "sanitized")
    with container(tmp_path_factory.mktemp("a"), binary=binary) as started:
        yield started


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentSandbox]:
    require_binary()
    with container(tmp_path_factory.mktemp("a")) as started:
        yield started


@pytest.fixture
async def channel(sandbox: AgentSandbox) -> AsyncIterator[AgentChannel]:
    opened = await AgentChannel.connect(sandbox.socket)
    yield opened
    await opened.aclose()


def raw(at: AgentSandbox) -> socket.socket:
    """A connection that has read its hello."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(str(at.socket))
    length, kind, _ = struct.unpack("<IBI", _exactly(sock, 9))
    assert kind == FrameType.HELLO
    _exactly(sock, length)
    return sock


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError(data)
        data += part
    return data


def until_closed(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            data += part
    return data


def wire(kind: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IBI", len(payload), kind, stream) + payload


async def works(at: AgentSandbox) -> bool:
    channel = await AgentChannel.connect(at.socket)
    name = f"works{random.getrandbits(60)}"
    result = await channel.exec(
        ExecSpec(exec_id=name, argv=("/bin/sh", "-c", "echo $X"), env={"X": name})
    )
    await channel.aclose()
    return result.stdout == name.encode() + b"\n"


MALFORMED = {
    "too long": struct.pack("<IBI", MAX_PAYLOAD + 1, FrameType.PING, 1),
    "unknown type": wire(0x7F, 1),
    "an answer's type": wire(FrameType.EXIT, 1, bytes(70)),
    "stream zero": wire(FrameType.LIST, 0),
    "empty exec": wire(FrameType.EXEC, 1),
    "bytes left over": wire(FrameType.LIST, 1, b"x"),
    "string past the end": wire(FrameType.ATTACH, 1, struct.pack("<I", 2**32 - 1) + b"abc"),
    "string without NUL": wire(FrameType.KILL, 1, struct.pack("<I", 3) + b"abcd" + bytes(5)),
    "string with NUL": wire(FrameType.KILL, 1, struct.pack("<I", 3) + b"a\0c\0" + bytes(5)),
    "argc beyond the frame": codec.encode_exec(1, Spec(exec_id="m", argv=("x",)), 0).replace(
        struct.pack("<I", 1) + struct.pack("<I", 1) + b"x",
        struct.pack("<I", 2**32 - 1) + struct.pack("<I", 1) + b"x",
    ),
    "no argv": codec.encode_exec(1, Spec(exec_id="m", argv=("x",)), 0)
    .replace(struct.pack("<I", 1) + struct.pack("<I", 1) + b"x\0", struct.pack("<I", 0))[4:]
    .join([struct.pack("<I", 50), b""]),
    "long ping": wire(FrameType.PING, 1, bytes(65)),
    "signal 65": codec.encode_kill(1, "x", 65, 1),
    "scope 2": codec.encode_kill(1, "x", 9, 2),
    "flags of attach": codec.encode_attach(1, "x", 0, (0, 0), AttachFlag(2)),
    "stdin beyond the window": codec.encode_exec(
        1, Spec(exec_id="w", argv=("/bin/cat",), stdin_pipe=True), 0
    )
    + codec.encode_stdin(1, 0, bytes(65537)),
    "stdin with a gap": codec.encode_exec(
        1, Spec(exec_id="g", argv=("/bin/cat",), stdin_pipe=True), 0
    )
    + codec.encode_stdin(1, 1, b"x"),
    "stdin that is no pipe": codec.encode_exec(1, Spec(exec_id="n", argv=("/bin/sleep", "9")), 0)
    + codec.encode_stdin(1, 0, b"x"),
    "stream in use": codec.encode_exec(1, Spec(exec_id="u", argv=("/bin/sleep", "9")), 0)
    + wire(FrameType.LIST, 1),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_frame_closes_the_connection_and_nothing_else(
    sanitized: AgentSandbox, name: str
) -> None:
    with raw(sanitized) as sock:
        sock.sendall(MALFORMED[name])
        answer = until_closed(sock)
    kinds = []
    while answer:
        length, kind, stream = struct.unpack_from("<IBI", answer)
        kinds.append((kind, stream, answer[9:11]))
        answer = answer[9 + length :]
    assert kinds[-1] == (FrameType.ERROR, 0, struct.pack("<H", 1))
    assert await works(sanitized)


def _valid_frames() -> list[bytes]:
    spec = Spec(
        exec_id="fuzzed",
        argv=("/bin/sh", "-c", "cat; echo out; echo err >&2"),
        env={"PATH": "/bin", "A": "b"},
        stdin_pipe=True,
        timeout_s=0.2,
        capture_bytes=5,
    )
    request = codec.FileRequest(op=FileOp.READ, path="/etc/passwd", size=100, timeout_s=0.2)
    listing = codec.FileRequest(op=FileOp.LIST, path="/etc", timeout_s=0.2)
    return [
        codec.encode_exec(1, spec, 1000),
        codec.encode_file(2, request, 1000),
        codec.encode_file(3, listing, 100_000),
        codec.encode_attach(4, "fuzzed", 100, (1, 2), AttachFlag.WATCH),
        codec.encode_stdin(1, 0, b"data"),
        wire(FrameType.CLOSE_STDIN, 1),
        codec.encode_u32(FrameType.CREDIT, 1, 77),
        wire(FrameType.DETACH, 2),
        codec.encode_kill(5, "fuzzed", 9, 1),
        codec.encode_kill(6, "fuzzed", 15, 0),
        wire(FrameType.LIST, 7),
        wire(FrameType.PING, 8, b"ping"),
        codec.encode_u64(FrameType.FROZEN_FOR, 0, 2**64 - 1),
    ]


def _mutated(chance: random.Random, frames: list[bytes]) -> bytes:
    data = bytearray(b"".join(chance.choices(frames, k=chance.randrange(1, 30))))
    for _ in range(chance.choice((0, 0, 1, 3, 10))):
        at = chance.randrange(len(data))
        how = chance.randrange(4)
        if how == 0:
            data[at] = chance.randrange(256)
        elif how == 1:
            data[at : at + 4] = struct.pack("<I", chance.choice((0, 1, 2**31, 2**32 - 1, 65)))
        elif how == 2:
            del data[at : at + chance.randrange(1, 9)]
        else:
            data[at:at] = chance.randbytes(chance.randrange(1, 9))
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
async def test_mutated_requests_never_hurt_the_agent(sanitized: AgentSandbox, seed: int) -> None:
    chance = random.Random(seed)
    frames = _valid_frames()
    for _ in range(150):
        with raw(sanitized) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(_mutated(chance, frames))
            if chance.random() < 0.5:
                sock.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    sock.recv(100_000)
    assert await works(sanitized)


async def test_an_edge_that_never_reads_is_held_off(sanitized: AgentSandbox) -> None:
    """Its requests wait in its own socket; the agent neither grows nor stops for others."""
    flood = wire(FrameType.LIST, 9) * 20_000
    with raw(sanitized) as sock:
        sock.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            sock.sendall(flood * 10)
        assert await works(sanitized)


async def test_a_request_in_single_bytes_is_the_same_request(sanitized: AgentSandbox) -> None:
    with raw(sanitized) as sock:
        for byte in wire(FrameType.PING, 3, b"slow"):
            sock.sendall(bytes([byte]))
        assert _exactly(sock, 13) == wire(FrameType.PONG, 3, b"slow")


async def test_everyday_work_is_clean_under_the_sanitizers(sanitized: AgentSandbox) -> None:
    channel = await AgentChannel.connect(sanitized.socket)
    path = "/tmp/file"

    async def one(number: int) -> bool:
        script = f"cat; head -c {number * 3000} /dev/zero; echo {number} >&2; sleep 0.0{number % 9}"
        result = await channel.exec(
            ExecSpec(
                exec_id=f"daily{number}",
                argv=("/bin/sh", "-c", script),
                env={"PATH": "/bin:/usr/bin"},
                timeout_s=0.02 if number % 7 == 0 else 20,
            ),
            stdin=bytes(number * 1000),
        )
        return result.timed_out or result.stdout_total == number * 4000

    assert all(await asyncio.gather(*(one(number) for number in range(120))))
    await channel.files.write(path, bytes(300_000))
    assert len((await channel.files.read(path)).data) == 300_000
    await channel.files.rename(path, "/tmp/other")
    await channel.files.make_dir("/tmp/file/a/b")
    await channel.files.list("/bin")
    await channel.files.remove("/tmp/file", recursive=True)
    assert await works(sanitized)


# --- root inside the sandbox ---


async def test_root_inside_cannot_trace_read_or_limit_the_agent(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    install(sandbox, "attack", Path(__file__).with_name("attack_agent.c").read_text())
    result = await channel.exec(ExecSpec(exec_id="attack", argv=("/bin/attack",)))
    assert result.stdout.decode().splitlines() == [
        "ptrace: denied",
        "process_vm_readv: denied",
        "pidfd_getfd: denied",
        "prlimit: denied",
        "setns: denied",
        "open /proc/1/mem: denied",
        "open /proc/1/maps: denied",
        "open /proc/1/environ: denied",
        "open /proc/1/exe: denied",
        "open /proc/1/cwd: denied",
        "open /proc/1/fd/3: denied",
        "open /proc/1/fd/4: denied",
        "ioctl on own cgroup: absent",
    ]
    assert result.exit_code == 0


async def test_the_channel_cannot_be_seen_from_inside(
    channel: AgentChannel, sandbox: AgentSandbox
) -> None:
    script = (
        f"readlink /proc/1/fd/*; ls {sandbox.socket}; ls /sys/fs/cgroup; wc -l < /proc/net/unix"
    )
    result = await channel.exec(ExecSpec(exec_id="see", argv=("/bin/sh", "-c", script)))
    assert result.stdout == b"1\n"  # the heading


async def test_a_command_inherits_nothing_of_the_agents(channel: AgentChannel) -> None:
    result = await channel.exec(
        ExecSpec(
            exec_id="fds", argv=("/bin/sh", "-c", "for f in /proc/$$/fd/*; do readlink $f; done")
        )
    )
    kinds = [line.split(b":")[0] for line in result.stdout.splitlines()]
    assert kinds == [b"/dev/null", b"pipe", b"pipe"]


PEER = """
import socket
s = socket.socket(socket.AF_UNIX)
s.settimeout(5)
s.connect({path!r})
print(s.recv(100))
"""


async def test_a_peer_inside_the_namespace_is_turned_away(tmp_path: Path) -> None:
    """This agent shares the host's files, so a process in its pid namespace finds the socket."""
    require_binary()
    with plain(tmp_path) as own:
        channel = await AgentChannel.connect(own.socket)
        argv = (sys.executable, "-c", PEER.format(path=str(own.socket)))
        result = await channel.exec(ExecSpec(exec_id="peer", argv=argv))
        assert result.stdout == b"b''\n", result
        assert await works(own) is True
