"""The numbers of ``aether/PROTOCOL.md``; ``aether/protocol.h`` is the twin a test compares."""

from __future__ import annotations

from enum import IntEnum, IntFlag

VERSION_MAJOR = 1
VERSION_MINOR = 0
HEADER_BYTES = 9
MAX_PAYLOAD = 2 * 1024 * 1024
MAX_EXEC_ID = 64
MAX_PING = 64
NO_LIMIT = 2**64 - 1
MODE_KEEP = 2**32 - 1


class FrameType(IntEnum):
    EXEC = 0x01
    FILE = 0x02
    ATTACH = 0x03
    DETACH = 0x04
    CREDIT = 0x05
    STDIN = 0x06
    CLOSE_STDIN = 0x07
    KILL = 0x08
    LIST = 0x09
    PING = 0x0A
    SHUTDOWN = 0x0B
    FROZEN_FOR = 0x0C
    HELLO = 0x81
    STARTED = 0x82
    OUTPUT = 0x83
    STDIN_CREDIT = 0x84
    EXIT = 0x85
    DONE = 0x86
    PROCESSES = 0x87
    PONG = 0x88
    ERROR = 0x89


class ErrorCode(IntEnum):
    MALFORMED = 1
    SUPERSEDED = 2
    UNKNOWN_EXEC = 3
    CONFLICT = 4
    LIMIT = 5
    UNSUPPORTED = 6
    SHUTTING_DOWN = 7


class ExecFlag(IntFlag):
    STDIN_PIPE = 1
    NO_NEW_PRIVS = 2
    TTY = 4
    WATCH = 8


class AttachFlag(IntFlag):
    WATCH = 1


class StartedFlag(IntFlag):
    KNOWN = 1
    ENDED = 2


class ExitReason(IntEnum):
    EXITED = 0
    SIGNALLED = 1
    NOT_STARTED = 2


class Stage(IntEnum):
    """Where a command that did not start failed."""

    NONE = 0
    USER = 1
    CGROUP = 2
    CWD = 3
    EXEC = 4
    FILE = 5
    PRIVILEGES = 6


class ExitFlag(IntFlag):
    TIMED_OUT = 1
    KILLED = 2
    SURVIVORS = 4


class KillScope(IntEnum):
    GROUP = 0
    TREE = 1


class ProcessState(IntEnum):
    RUNNING = 1
    CHILDREN_LEFT = 2
    ENDED = 3


class FileOp(IntEnum):
    READ = 1
    WRITE = 2
    LIST = 3
    STAT = 4
    REMOVE = 5
    RENAME = 6
    MKDIR = 7


class FileFlag(IntFlag):
    RECURSIVE = 1
    FOLLOW = 2


class HelloFlag(IntFlag):
    CGROUP = 1


class OutputStream(IntEnum):
    STDOUT = 1
    STDERR = 2
