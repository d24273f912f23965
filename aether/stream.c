/* What the edge sees of a command: the stream it is attached to. */
#include <errno.h>
#include <string.h>
#include <sys/wait.h>

#include "conn.h"
#include "exec.h"
#include "kept.h"

static struct list ready_queue = {&ready_queue, &ready_queue};

void exec_wake(struct exec *exec) {
    if (exec->stream && list_empty(&exec->ready))
        list_append(&ready_queue, &exec->ready);
}

bool exec_pending(void) { return !list_empty(&ready_queue); }

bool exec_has_reader(const struct exec *exec) { return exec->stream != 0 && !exec->watch; }

void exec_attach(struct exec *exec, uint32_t stream, uint32_t credit, bool watch) {
    if (exec->stream)
        reply_error(exec->stream, ERROR_SUPERSEDED, 0, "a newer request took over");
    exec_index_stream(exec, stream);
    exec->credit = credit;
    exec->watch = watch;
    output_unblock(&exec->out[0]); /* to find out anew whether somebody is waited for */
    output_unblock(&exec->out[1]);
    exec_wake(exec);
}

void exec_seek(struct exec *exec, uint64_t stdout_at, uint64_t stderr_at) {
    output_seek(&exec->out[0], stdout_at);
    output_seek(&exec->out[1], stderr_at);
}

void exec_send_started(struct exec *exec, bool known) {
    exec->in.told = exec->in.is_pipe ? exec->in.written + STDIN_WINDOW : 0;
    out_begin(FRAME_STARTED, exec->stream);
    out_u32((uint32_t)exec->pid);
    out_u8((known ? STARTED_KNOWN : 0) | (exec->state == EXEC_ENDED ? STARTED_ENDED : 0));
    out_u64(exec->started_ns);
    out_u64(exec->in.received);
    out_u64(exec->in.told);
    out_end();
}

void exec_detach(struct exec *exec) {
    exec_index_stream(exec, 0);
    exec->credit = 0;
    list_remove(&exec->ready);
    output_unblock(&exec->out[0]);
    output_unblock(&exec->out[1]);
    if (!exec->is_file)
        return;
    /* Nobody can ask for it again. */
    if (exec->state == EXEC_ENDED) {
        exec_release(exec);
    } else {
        exec_abandon(exec);
        exec_check(exec);
    }
}

void exec_add_credit(struct exec *exec, uint32_t bytes) {
    exec->credit = exec->credit > UINT32_MAX - bytes ? UINT32_MAX : exec->credit + bytes;
    exec_wake(exec);
}

/* exit_code as a shell would report it; reason, stage and errno say what really happened. */
static void send_exit(const struct exec *exec) {
    const struct report *report = spawn_report(exec_slot(exec));
    enum exit_reason reason = REASON_EXITED;
    int exit_code = WEXITSTATUS(exec->status), signal = 0;
    if (WIFSIGNALED(exec->status)) {
        reason = REASON_SIGNALLED;
        signal = WTERMSIG(exec->status);
        exit_code = 128 + signal;
    } else if (report->stage != STAGE_NONE) {
        reason = REASON_NOT_STARTED;
        bool absent = report->error == ENOENT || report->error == ENOTDIR;
        exit_code = report->stage == STAGE_EXEC && absent ? 127 : 126;
    }
    out_begin(FRAME_EXIT, exec->stream);
    out_u8((uint8_t)reason);
    out_u8(reason == REASON_NOT_STARTED ? (uint8_t)report->stage : STAGE_NONE);
    out_u8((exec->timed_out ? EXIT_TIMED_OUT : 0) | (exec->killed ? EXIT_KILLED : 0) |
           (exec->survivors ? EXIT_SURVIVORS : 0));
    out_u32((uint32_t)exit_code);
    out_u32((uint32_t)signal);
    out_u32(reason == REASON_NOT_STARTED ? (uint32_t)report->error : 0);
    out_u64(exec->out[0].total);
    out_u64(exec->out[1].total);
    out_u64(exec->out[0].dropped);
    out_u64(exec->out[1].dropped);
    out_u64(exec->started_ns);
    out_u64(exec->ended_ns);
    out_u64(report->value);
    out_end();
}

/* One turn of one stream; true if it could go on at once. */
static bool send_some(struct exec *exec) {
    if (input_credit_due(&exec->in))
        input_send_credit(&exec->in, exec->stream);
    for (int i = 0; i < 2 && !exec->watch; i++) {
        int which = exec->turn ^ i;
        struct output *output = &exec->out[which];
        uint32_t sent =
            output_send(output, (uint8_t)(OUTPUT_STDOUT + which), exec->stream, exec->credit);
        exec->credit -= sent;
        if (sent)
            output_unblock(output);
    }
    exec->turn ^= 1;
    if (!exec->watch && (output_pending(&exec->out[0]) || output_pending(&exec->out[1])))
        return exec->credit > 0;
    if (exec->state == EXEC_ENDED) {
        send_exit(exec);
        if (!exec->is_file && !exec->watch)
            kept_read(exec);
        exec_detach(exec);
    }
    return false;
}

void exec_pump(void) {
    while (conn_has_room() && !list_empty(&ready_queue)) {
        struct exec *exec = container_of(ready_queue.next, struct exec, ready);
        list_remove(&exec->ready);
        if (send_some(exec))
            exec_wake(exec);
    }
}
