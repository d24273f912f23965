#include "request.h"

#include <errno.h>
#include <string.h>

#include "conn.h"
#include "exec.h"
#include "shutdown.h"
#include "wire.h"

static uint8_t boot_id[16];

void request_init(const uint8_t id[16]) { memcpy(boot_id, id, sizeof boot_id); }

void request_hello(void) {
    out_begin(FRAME_HELLO, 0);
    out_u16(VERSION_MAJOR);
    out_u16(VERSION_MINOR);
    out_bytes(boot_id, sizeof boot_id);
    out_u64(now_ns());
    out_u32(tree_has_cgroups() ? HELLO_CGROUP : 0);
    out_u32(MAX_PAYLOAD);
    out_u32(MAX_LIVE);
    out_u32(MAX_READ);
    out_u32(STDIN_WINDOW);
    out_u32(RING_BYTES);
    out_u32((uint32_t)pool_bytes());
    out_u32(RETAIN_BYTES);
    out_u32(RETAIN_S);
    exec_list();
    out_end();
}

static bool id_is_valid(const struct str *id) { return id->len > 0 && id->len <= MAX_EXEC_ID; }

/* --- requests that open a stream --- */

static void start(const struct exec_options *options, const struct job *job) {
    if (shutdown_begun()) {
        reply_error(options->stream, ERROR_SHUTTING_DOWN, 0, "the sandbox is being stopped");
        return;
    }
    int error;
    struct exec *exec = exec_start(options, job, &error);
    if (exec)
        exec_send_started(exec, false);
    else
        reply_error(options->stream, ERROR_LIMIT, error, strerror(error));
}

static struct wire skip_strings(struct wire *w, uint32_t count) {
    struct wire at = *w;
    for (uint32_t i = 0; i < count && !w->bad; i++)
        wire_str(w);
    return at;
}

static const char *handle_exec(uint32_t stream, struct wire *w) {
    struct exec_options options = {.stream = stream};
    struct job job = {.is_file = false};
    options.id = wire_str(w);
    options.digest = wire_u64(w);
    options.credit = wire_u32(w);
    options.capture = wire_u64(w);
    options.timeout_ms = wire_u32(w);
    job.command.flags = wire_u32(w);
    job.command.cwd = wire_str(w);
    job.command.user = wire_str(w);
    job.command.argc = wire_u32(w);
    job.command.args = skip_strings(w, job.command.argc);
    job.command.envc = wire_u32(w);
    job.command.envs = skip_strings(w, job.command.envc);
    if (!wire_done(w) || !id_is_valid(&options.id) || job.command.argc == 0)
        return "EXEC";
    const uint32_t supported = EXEC_STDIN_PIPE | EXEC_NO_NEW_PRIVS | EXEC_WATCH;
    options.stdin_pipe = job.command.flags & EXEC_STDIN_PIPE;
    options.watch = job.command.flags & EXEC_WATCH;

    struct exec *known = exec_by_id(&options.id);
    if (known && known->digest && options.digest && known->digest != options.digest) {
        reply_error(stream, ERROR_CONFLICT, EEXIST, "this exec_id ran something else");
    } else if (known) {
        exec_attach(known, stream, options.credit, options.watch);
        exec_seek(known, 0, 0);
        exec_send_started(known, true);
    } else if (job.command.flags & ~supported) {
        reply_error(stream, ERROR_UNSUPPORTED, ENOSYS, "unknown flag");
    } else {
        start(&options, &job);
    }
    return NULL;
}

static const char *handle_file(uint32_t stream, struct wire *w) {
    struct exec_options options = {.stream = stream, .capture = NO_LIMIT, .id = {"", 0}};
    struct job job = {.is_file = true};
    job.file.op = wire_u8(w);
    options.credit = wire_u32(w);
    options.timeout_ms = wire_u32(w);
    job.file.flags = wire_u32(w);
    job.file.mode = wire_u32(w);
    job.file.offset = wire_u64(w);
    job.file.size = wire_u64(w);
    job.file.user = wire_str(w);
    job.file.path = wire_str(w);
    job.file.path2 = wire_str(w);
    if (!wire_done(w))
        return "FILE";
    options.stdin_pipe = job.file.op == FILE_WRITE;
    if (job.file.op < FILE_READ || job.file.op > FILE_MKDIR ||
        job.file.flags & ~(uint32_t)(FILE_RECURSIVE | FILE_FOLLOW))
        reply_error(stream, ERROR_UNSUPPORTED, ENOSYS, "unknown file operation or flag");
    else
        start(&options, &job);
    return NULL;
}

static const char *handle_attach(uint32_t stream, struct wire *w) {
    struct str id = wire_str(w);
    uint32_t flags = wire_u32(w), credit = wire_u32(w);
    uint64_t stdout_at = wire_u64(w), stderr_at = wire_u64(w);
    if (!wire_done(w) || !id_is_valid(&id) || flags & ~(uint32_t)ATTACH_WATCH)
        return "ATTACH";
    struct exec *exec = exec_by_id(&id);
    if (exec) {
        exec_attach(exec, stream, credit, flags & ATTACH_WATCH);
        exec_seek(exec, stdout_at, stderr_at);
        exec_send_started(exec, true);
    } else {
        reply_error(stream, ERROR_UNKNOWN_EXEC, ESRCH, "no such command runs or is kept");
    }
    return NULL;
}

static const char *handle_kill(uint32_t stream, struct wire *w) {
    struct str id = wire_str(w);
    uint32_t signal = wire_u32(w);
    uint8_t scope = wire_u8(w);
    if (!wire_done(w) || !id_is_valid(&id) || scope > SCOPE_TREE || signal > 64)
        return "KILL";
    struct exec *exec = exec_by_id(&id);
    if (exec)
        exec_kill(exec, stream, (int)signal, scope == SCOPE_TREE);
    else
        reply_error(stream, ERROR_UNKNOWN_EXEC, ESRCH, "no such command runs or is kept");
    return NULL;
}

static const char *handle_list(uint32_t stream, struct wire *w) {
    if (!wire_done(w))
        return "LIST";
    out_begin(FRAME_PROCESSES, stream);
    exec_list();
    out_end();
    return NULL;
}

static const char *handle_ping(uint32_t stream, struct wire *w) {
    size_t len = (size_t)(w->end - w->at);
    if (len > MAX_PING)
        return "PING";
    out_begin(FRAME_PONG, stream);
    out_bytes(w->at, len);
    out_end();
    return NULL;
}

static const char *handle_shutdown(uint32_t stream, struct wire *w) {
    uint32_t grace_ms = wire_u32(w);
    if (!wire_done(w))
        return "SHUTDOWN";
    shutdown_begin(stream, grace_ms * MS);
    return NULL;
}

/* --- frames for an open stream: ignored if it has just ended --- */

static const char *handle_credit(struct exec *exec, struct wire *w) {
    uint32_t bytes = wire_u32(w);
    if (!wire_done(w))
        return "CREDIT";
    if (exec)
        exec_add_credit(exec, bytes);
    return NULL;
}

static const char *handle_stdin(struct exec *exec, struct wire *w) {
    uint64_t offset = wire_u64(w);
    if (w->bad)
        return "STDIN";
    if (exec && !input_write(&exec->in, offset, w->at, (size_t)(w->end - w->at)))
        return "STDIN outside its window";
    return NULL;
}

static const char *handle_close_stdin(struct exec *exec, struct wire *w) {
    if (!wire_done(w))
        return "CLOSE_STDIN";
    if (exec)
        input_finish(&exec->in);
    return NULL;
}

static const char *handle_detach(struct exec *exec, struct wire *w) {
    if (!wire_done(w))
        return "DETACH";
    if (exec)
        exec_detach(exec);
    return NULL;
}

static const char *handle_frozen_for(uint32_t stream, struct wire *w) {
    uint64_t ns = wire_u64(w);
    if (!wire_done(w) || stream != 0)
        return "FROZEN_FOR";
    exec_shift_deadlines(ns);
    return NULL;
}

const char *request_handle(uint8_t type, uint32_t stream, const uint8_t *payload, size_t len) {
    struct wire w = wire_over(payload, len);
    if (type == FRAME_FROZEN_FOR)
        return handle_frozen_for(stream, &w);
    if (stream == 0)
        return "stream 0";
    struct exec *exec = exec_by_stream(stream);
    switch (type) {
    case FRAME_CREDIT:
        return handle_credit(exec, &w);
    case FRAME_STDIN:
        return handle_stdin(exec, &w);
    case FRAME_CLOSE_STDIN:
        return handle_close_stdin(exec, &w);
    case FRAME_DETACH:
        return handle_detach(exec, &w);
    }
    if (exec)
        return "stream in use";
    switch (type) {
    case FRAME_EXEC:
        return handle_exec(stream, &w);
    case FRAME_FILE:
        return handle_file(stream, &w);
    case FRAME_ATTACH:
        return handle_attach(stream, &w);
    case FRAME_KILL:
        return handle_kill(stream, &w);
    case FRAME_LIST:
        return handle_list(stream, &w);
    case FRAME_PING:
        return handle_ping(stream, &w);
    case FRAME_SHUTDOWN:
        return handle_shutdown(stream, &w);
    }
    return "unknown type";
}
