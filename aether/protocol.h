/* The numbers of PROTOCOL.md. services/edge/agent/protocol.py is the other copy; a test compares
 * them name by name. */
#ifndef AETHER_PROTOCOL_H
#define AETHER_PROTOCOL_H

#include <stdint.h>

#define VERSION_MAJOR 1
#define VERSION_MINOR 0
#define HEADER_BYTES 9
#define MAX_PAYLOAD (2 * 1024 * 1024)
#define MAX_EXEC_ID 64
#define MAX_PING 64
#define NO_LIMIT UINT64_MAX
#define MODE_KEEP UINT32_MAX

enum frame_type {
    FRAME_EXEC = 0x01,
    FRAME_FILE = 0x02,
    FRAME_ATTACH = 0x03,
    FRAME_DETACH = 0x04,
    FRAME_CREDIT = 0x05,
    FRAME_STDIN = 0x06,
    FRAME_CLOSE_STDIN = 0x07,
    FRAME_KILL = 0x08,
    FRAME_LIST = 0x09,
    FRAME_PING = 0x0a,
    FRAME_SHUTDOWN = 0x0b,
    FRAME_FROZEN_FOR = 0x0c,
    FRAME_HELLO = 0x81,
    FRAME_STARTED = 0x82,
    FRAME_OUTPUT = 0x83,
    FRAME_STDIN_CREDIT = 0x84,
    FRAME_EXIT = 0x85,
    FRAME_DONE = 0x86,
    FRAME_PROCESSES = 0x87,
    FRAME_PONG = 0x88,
    FRAME_ERROR = 0x89,
};

enum error_code {
    ERROR_MALFORMED = 1,
    ERROR_SUPERSEDED = 2,
    ERROR_UNKNOWN_EXEC = 3,
    ERROR_CONFLICT = 4,
    ERROR_LIMIT = 5,
    ERROR_UNSUPPORTED = 6,
    ERROR_SHUTTING_DOWN = 7,
};

enum exec_flag {
    EXEC_STDIN_PIPE = 1,
    EXEC_NO_NEW_PRIVS = 2,
    EXEC_TTY = 4,
    EXEC_WATCH = 8,
};

enum attach_flag {
    ATTACH_WATCH = 1,
};

enum started_flag {
    STARTED_KNOWN = 1,
    STARTED_ENDED = 2,
};

enum exit_reason {
    REASON_EXITED = 0,
    REASON_SIGNALLED = 1,
    REASON_NOT_STARTED = 2,
};

enum stage {
    STAGE_NONE = 0,
    STAGE_USER = 1,
    STAGE_CGROUP = 2,
    STAGE_CWD = 3,
    STAGE_EXEC = 4,
    STAGE_FILE = 5,
    STAGE_PRIVILEGES = 6,
};

enum exit_flag {
    EXIT_TIMED_OUT = 1,
    EXIT_KILLED = 2,
    EXIT_SURVIVORS = 4,
};

enum kill_scope {
    SCOPE_GROUP = 0,
    SCOPE_TREE = 1,
};

enum process_state {
    PROCESS_RUNNING = 1,
    PROCESS_CHILDREN_LEFT = 2,
    PROCESS_ENDED = 3,
};

enum file_op {
    FILE_READ = 1,
    FILE_WRITE = 2,
    FILE_LIST = 3,
    FILE_STAT = 4,
    FILE_REMOVE = 5,
    FILE_RENAME = 6,
    FILE_MKDIR = 7,
};

enum file_flag {
    FILE_RECURSIVE = 1,
    FILE_FOLLOW = 2,
};

enum hello_flag {
    HELLO_CGROUP = 1,
};

enum output_stream {
    OUTPUT_STDOUT = 1,
    OUTPUT_STDERR = 2,
};

#endif
