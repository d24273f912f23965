"""Frames to bytes and back. Pure: no I/O, no state beyond a decoder's unfinished frame.

Encoders raise ``ValueError`` for what the protocol cannot carry (a NUL in a string, a frame too
long); decoders raise ``AgentProtocolError`` for bytes that are not the protocol.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from .errors import AgentProtocolError
from .model import ExecSpec, FileEntry, Hello, ProcessInfo
from .protocol import (
    HEADER_BYTES,
    MAX_EXEC_ID,
    MAX_PAYLOAD,
    NO_LIMIT,
    AttachFlag,
    ErrorCode,
    ExecFlag,
    ExitFlag,
    ExitReason,
    FrameType,
    HelloFlag,
    OutputStream,
    ProcessState,
    Stage,
    StartedFlag,
)

_HEADER = struct.Struct("<IBI")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STARTED = struct.Struct("<IBQQQ")
_OUTPUT = struct.Struct("<BQ")
_EXIT = struct.Struct("<BBBiII7Q")
_HELLO = struct.Struct("<HH16sQ9I")
_PROCESS = struct.Struct("<IBQQ4Q")
_ENTRY = struct.Struct("<IIIQq")
_ERROR = struct.Struct("<HI")
_FILE = struct.Struct("<BIIIIQQ")

MAX_U32 = 2**32 - 1
E = TypeVar("E", bound=IntEnum)


@dataclass(frozen=True, slots=True)
class Frame:
    type: int
    stream: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Started:
    pid: int
    flags: StartedFlag
    started_ns: int
    stdin_received: int
    stdin_limit: int


@dataclass(frozen=True, slots=True)
class Exit:
    reason: ExitReason
    stage: Stage
    flags: ExitFlag
    exit_code: int
    signal: int
    errno: int
    stdout_total: int
    stderr_total: int
    stdout_dropped: int
    stderr_dropped: int
    started_ns: int
    ended_ns: int
    value: int


@dataclass(frozen=True, slots=True)
class Refusal:
    code: ErrorCode
    errno: int
    message: str


class FrameDecoder:
    """Cuts a byte stream into frames. After an ``AgentProtocolError`` it must not be used again."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        # The usual case, whole frames and nothing kept back, copies nothing.
        if self._pending:
            self._pending += data
            data = bytes(self._pending)
        view, at, end = memoryview(data), 0, len(data)
        frames: list[Frame] = []
        while end - at >= HEADER_BYTES:
            length, kind, stream = _HEADER.unpack_from(view, at)
            if length > MAX_PAYLOAD:
                raise AgentProtocolError(f"frame of {length} bytes, at most {MAX_PAYLOAD} allowed")
            if end - at - HEADER_BYTES < length:
                break
            at += HEADER_BYTES
            frames.append(Frame(kind, stream, view[at : at + length]))
            at += length
        self._pending = bytearray(view[at:])
        return frames


# --- edge to agent ---


def encode_frame(kind: FrameType, stream: int, payload: bytes = b"") -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"{kind.name} of {len(payload)} bytes: at most {MAX_PAYLOAD} fit a frame")
    return _HEADER.pack(len(payload), kind, stream) + payload


def encode_str(text: str | bytes) -> bytes:
    raw = os.fsencode(text)
    if b"\0" in raw:
        raise ValueError("a NUL byte cannot be part of an argument, variable, path or name")
    return _U32.pack(len(raw)) + raw + b"\0"


def encode_exec_id(exec_id: str) -> bytes:
    encoded = encode_str(exec_id)
    if not 1 <= len(encoded) - 5 <= MAX_EXEC_ID:
        raise ValueError(f"exec_id {exec_id!r} must have 1 to {MAX_EXEC_ID} bytes")
    return encoded


def encode_timeout(timeout_s: float | None) -> int:
    """Milliseconds; 0 is none, so what is shorter than one becomes one."""
    if timeout_s is None:
        return 0
    if not 0 <= timeout_s <= MAX_U32 / 1000:
        raise ValueError(f"timeout_s {timeout_s} is outside 0..{MAX_U32 // 1000}")
    return max(1, round(timeout_s * 1000))


def encode_exec(stream: int, spec: ExecSpec, credit: int, *, watch: bool = False) -> bytes:
    if not spec.argv:
        raise ValueError("argv is empty")
    flags = ExecFlag(0)
    if spec.stdin_pipe:
        flags |= ExecFlag.STDIN_PIPE
    if spec.no_new_privs:
        flags |= ExecFlag.NO_NEW_PRIVS
    if watch:
        flags |= ExecFlag.WATCH
    capture = NO_LIMIT if spec.capture_bytes is None else spec.capture_bytes
    parts = [
        encode_exec_id(spec.exec_id),
        struct.pack("<QIQII", spec.digest, credit, capture, encode_timeout(spec.timeout_s), flags),
        encode_str(spec.cwd),
        encode_str(spec.user),
        _U32.pack(len(spec.argv)),
        *(encode_str(argument) for argument in spec.argv),
        _U32.pack(len(spec.env)),
        *(encode_str(f"{name}={value}") for name, value in spec.env.items()),
    ]
    return encode_frame(FrameType.EXEC, stream, b"".join(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest:
    op: int
    path: str
    path2: str = ""
    user: str = ""
    flags: int = 0
    mode: int = 2**32 - 1
    offset: int = 0
    size: int = 0
    timeout_s: float | None = None


def encode_file(stream: int, request: FileRequest, credit: int) -> bytes:
    numbers = _FILE.pack(
        request.op,
        credit,
        encode_timeout(request.timeout_s),
        request.flags,
        request.mode,
        request.offset,
        request.size,
    )
    names = (request.user, request.path, request.path2)
    return encode_frame(FrameType.FILE, stream, numbers + b"".join(map(encode_str, names)))


def encode_attach(
    stream: int, exec_id: str, credit: int, offsets: tuple[int, int], flags: AttachFlag
) -> bytes:
    numbers = struct.pack("<IIQQ", flags, credit, *offsets)
    return encode_frame(FrameType.ATTACH, stream, encode_exec_id(exec_id) + numbers)


def encode_kill(stream: int, exec_id: str, signal: int, scope: int) -> bytes:
    payload = encode_exec_id(exec_id) + struct.pack("<IB", signal, scope)
    return encode_frame(FrameType.KILL, stream, payload)


def encode_stdin(stream: int, offset: int, data: bytes | memoryview) -> bytes:
    return b"".join((_HEADER.pack(8 + len(data), FrameType.STDIN, stream), _U64.pack(offset), data))


def encode_u32(kind: FrameType, stream: int, value: int) -> bytes:
    return _HEADER.pack(4, kind, stream) + _U32.pack(value)


def encode_u64(kind: FrameType, stream: int, value: int) -> bytes:
    return _HEADER.pack(8, kind, stream) + _U64.pack(value)


# --- agent to edge: later minor versions may append fields, which are ignored ---


def _unpack(layout: struct.Struct, view: memoryview, at: int = 0) -> tuple[int, ...]:
    try:
        return layout.unpack_from(view, at)
    except struct.error as err:
        raise AgentProtocolError(f"frame too short: {err}") from err


def _checked_str(view: memoryview, at: int) -> tuple[str, int]:
    """As ``os.fsdecode``: bytes that are not UTF-8 become surrogate escapes."""
    (length,) = _unpack(_U32, view, at)
    start, end = at + _U32.size, at + _U32.size + length
    if end >= len(view) or view[end] != 0:
        raise AgentProtocolError("string runs past its frame")
    return os.fsdecode(bytes(view[start:end])), end + 1


def _enum(kind: type[E], value: int) -> E:
    try:
        return kind(value)
    except ValueError as err:
        raise AgentProtocolError(str(err)) from err


def decode_started(payload: memoryview) -> Started:
    pid, flags, started_ns, received, limit = _unpack(_STARTED, payload)
    return Started(pid, StartedFlag(flags), started_ns, received, limit)


def decode_output(payload: memoryview) -> tuple[OutputStream, int, memoryview]:
    which, offset = _unpack(_OUTPUT, payload)
    return _enum(OutputStream, which), offset, payload[_OUTPUT.size :]


def decode_exit(payload: memoryview) -> Exit:
    reason, stage, flags, *rest = _unpack(_EXIT, payload)
    return Exit(_enum(ExitReason, reason), _enum(Stage, stage), ExitFlag(flags), *rest)


def decode_u16(payload: memoryview) -> int:
    return _unpack(_U16, payload)[0]


def decode_u32(payload: memoryview) -> int:
    return _unpack(_U32, payload)[0]


def decode_u64(payload: memoryview) -> int:
    return _unpack(_U64, payload)[0]


def decode_error(payload: memoryview) -> Refusal:
    code, errno = _unpack(_ERROR, payload)
    message, _ = _checked_str(payload, _ERROR.size)
    return Refusal(_enum(ErrorCode, code), errno, message)


def decode_hello(payload: memoryview) -> Hello:
    major, minor, _boot_id, now_ns, flags, *limits = _unpack(_HELLO, payload)
    frame, live, records, window, ring, pool, retain_bytes, retain_s = limits
    return Hello(
        major=major,
        minor=minor,
        boot_id=bytes(payload[4:20]),
        now_ns=now_ns,
        leaf_cgroups=HelloFlag.CGROUP in HelloFlag(flags),
        max_frame=frame,
        max_live=live,
        max_records=records,
        stdin_window=window,
        ring_bytes=ring,
        pool_bytes=pool,
        retain_bytes=retain_bytes,
        retain_s=retain_s,
        processes=decode_processes(payload[_HELLO.size :]),
    )


def decode_processes(payload: memoryview) -> tuple[ProcessInfo, ...]:
    (count,) = _unpack(_U32, payload)
    at = _U32.size
    processes = []
    for _ in range(count):
        exec_id, at = _checked_str(payload, at)
        pid, state, started_ns, ended_ns, *numbers = _unpack(_PROCESS, payload, at)
        at += _PROCESS.size
        processes.append(
            ProcessInfo(
                exec_id=exec_id,
                pid=pid or None,
                state=_enum(ProcessState, state),
                started_ns=started_ns,
                ended_ns=ended_ns or None,
                stdout_total=numbers[0],
                stdout_kept_from=numbers[1],
                stderr_total=numbers[2],
                stderr_kept_from=numbers[3],
            )
        )
    return tuple(processes)


def decode_entries(data: bytes) -> tuple[FileEntry, ...]:
    """The output of the LIST and STAT file operations."""
    view, at = memoryview(data), 0
    entries = []
    while at < len(view):
        mode, uid, gid, size, mtime_ns = _unpack(_ENTRY, view, at)
        name, at = _checked_str(view, at + _ENTRY.size)
        target, at = _checked_str(view, at)
        entries.append(
            FileEntry(
                name=name,
                mode=mode,
                uid=uid,
                gid=gid,
                size=size,
                mtime_ns=mtime_ns,
                target=target,
            )
        )
    return tuple(entries)
