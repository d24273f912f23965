/* A command's way from its start to its end: deadlines, kills, and deciding when it is over. */
#include <errno.h>
#include <signal.h>

#include "conn.h"
#include "exec.h"
#include "kept.h"
#include "loop.h"

/* No earlier than this does any record's deadline come; may be too early, which costs one look. */
static uint64_t next_deadline = UINT64_MAX;

static void deadline(uint64_t at) {
    if (at < next_deadline)
        next_deadline = at;
}

static uint64_t min(uint64_t a, uint64_t b) { return a < b ? a : b; }

void exec_started(struct exec *exec, uint32_t timeout_ms) {
    exec->deadline_ns = timeout_ms ? exec->started_ns + timeout_ms * MS : UINT64_MAX;
    deadline(exec->deadline_ns);
}

/* --- killing --- */

static void tree_changed(struct source *source, uint32_t events) {
    (void)events;
    struct tree *tree = container_of(source, struct tree, empty);
    struct exec *exec = container_of(tree, struct exec, tree);
    if (tree_gone(tree))
        exec_check(exec);
}

/* A file operation nobody waits for any more ends by itself: its input ends early, its output
 * breaks. Killed at once, it could not remove its temporary file. */
void exec_abandon(struct exec *exec) {
    input_close(&exec->in);
    output_close(&exec->out[0]);
    output_close(&exec->out[1]);
    exec->deadline_ns = min(exec->deadline_ns, now_ns() + FILE_GRACE);
    deadline(exec->deadline_ns);
}

void exec_kill_tree(struct exec *exec) {
    if (exec->killing)
        return;
    exec->killing = true;
    exec->kill_ns = now_ns() + KILL_WAIT;
    tree_watch(&exec->tree, tree_changed);
    tree_signal(&exec->tree, SIGKILL);
    if (exec->pid)
        kill(exec->pid, SIGKILL); /* it may not have joined its leaf yet */
    list_remove(&exec->link);
    list_append(&exec_watched, &exec->link);
    deadline(tree_has_cgroups() ? exec->kill_ns : now_ns() + WALK_POLL);
}

/* True once the killed tree is gone, or has survived for so long that waiting makes no sense. */
static bool kill_is_over(struct exec *exec, bool gone) {
    uint64_t now = now_ns();
    if (!gone && now < exec->kill_ns) {
        deadline(tree_has_cgroups() ? exec->kill_ns : now + WALK_POLL);
        return false;
    }
    exec->killing = false;
    exec->survivors |= !gone;
    for (int i = 0; i < KILL_WAITERS; i++) {
        if (exec->kill_streams[i])
            reply_done(exec->kill_streams[i], gone ? 0 : ETIMEDOUT);
        exec->kill_streams[i] = 0;
    }
    return true;
}

static bool add_kill_waiter(struct exec *exec, uint32_t stream) {
    for (int i = 0; i < KILL_WAITERS; i++) {
        if (!exec->kill_streams[i]) {
            exec->kill_streams[i] = stream;
            return true;
        }
    }
    return false;
}

void exec_kill(struct exec *exec, uint32_t stream, int signal, bool tree) {
    if (exec->state == EXEC_ENDED && !exec->tree.leader) {
        reply_done(stream, ESRCH);
        return;
    }
    if (tree && signal == SIGKILL) {
        if (!add_kill_waiter(exec, stream)) {
            reply_error(stream, ERROR_LIMIT, EAGAIN, "too many are waiting for this kill");
            return;
        }
        exec->killed |= exec->state == EXEC_RUNNING;
        exec_kill_tree(exec);
        exec_check(exec);
        return;
    }
    int error = 0;
    if (tree || !exec->pid)
        tree_signal(&exec->tree, signal);
    else if (kill(-exec->pid, signal) < 0 &&
             kill(exec->pid, signal) < 0) /* before its setsid() there is no group */
        error = errno;
    reply_done(stream, error);
}

/* --- ending --- */

static void finish(struct exec *exec, bool gone) {
    if (exec->is_file && !exec->stream) { /* nobody can ask for it */
        exec_release(exec);
        return;
    }
    if (gone)
        tree_close(&exec->tree);
    else
        tree_watch(&exec->tree, tree_changed); /* children left behind: they can still be killed */
    input_close(&exec->in);
    output_discard(&exec->out[0]);
    output_discard(&exec->out[1]);
    exec_wake(exec);
    exec_ended(exec);
}

/* Pipes still open after the leader: held by children it left behind, or full of bytes the edge has
 * no credit for. */
static bool drained(const struct exec *exec) {
    bool open = false;
    for (int i = 0; i < 2; i++) {
        if (exec->out[i].blocked)
            return false;
        open |= output_is_open(&exec->out[i]);
    }
    uint64_t until = min(exec->idle_ns, exec->drain_ns);
    if (open && now_ns() < until) {
        deadline(until);
        return false;
    }
    return true;
}

/* From here on the leader counts as one of those left behind; if it dies after all, it is reaped
 * like them. */
static void left_by(struct exec *exec, int status) {
    exec_unindex_pid(exec);
    exec->status = status;
    exec->deadline_ns = UINT64_MAX; /* it was the leader's: what it left behind may stay */
    exec->ended_ns = now_ns();
    exec->idle_ns = exec->ended_ns + DRAIN_IDLE;
    exec->drain_ns = exec->ended_ns + DRAIN_MAX;
}

void exec_check(struct exec *exec) {
    if (exec->state == EXEC_FREE || (exec->pid && !exec->killing))
        return;
    if (exec->state == EXEC_RUNNING && !exec->killing && !drained(exec))
        return;
    bool gone = !exec->pid && tree_gone(&exec->tree), was_killing = exec->killing;
    if (was_killing && !kill_is_over(exec, gone))
        return;
    if (exec->state == EXEC_RUNNING) {
        if (exec->pid)
            left_by(exec,
                    SIGKILL); /* it survived that; what a wait status says of one who did not */
        if (drained(exec))
            finish(exec, gone);
    } else if (gone || was_killing) {
        if (gone)
            tree_close(&exec->tree);
        kept_return(exec);
    }
}

void exec_reaped(pid_t pid, int status) {
    struct exec *exec = exec_by_pid(pid);
    if (!exec)
        return;
    left_by(exec, status);
    output_read(&exec->out[0], READS_PER_EVENT);
    output_read(&exec->out[1], READS_PER_EVENT);
    exec_check(exec);
}

/* --- time --- */

uint64_t exec_next_deadline(void) { return min(next_deadline, kept_until()); }

void exec_tick(void) {
    uint64_t now = now_ns();
    if (now < exec_next_deadline())
        return;
    next_deadline = UINT64_MAX;
    for (struct list *at = exec_watched.next, *after; at != &exec_watched; at = after) {
        after = at->next;
        struct exec *exec = container_of(at, struct exec, link);
        if (exec->state == EXEC_RUNNING && !exec->killing && exec->deadline_ns <= now) {
            exec->deadline_ns = UINT64_MAX;
            if (exec->is_file && !exec->timed_out && exec->stream)
                exec_abandon(exec);
            else
                exec_kill_tree(exec);
            exec->timed_out = true;
        }
        deadline(exec->deadline_ns);
        if (exec->killing)
            deadline(exec->kill_ns);
        exec_check(exec);
    }
    if (kept_until() <= now) {
        kept_expire(now);
        exec_rest();
        conn_rest();
    }
}

void exec_shift_deadlines(uint64_t ns) {
    for (struct list *at = exec_watched.next; at != &exec_watched; at = at->next) {
        struct exec *exec = container_of(at, struct exec, link);
        if (exec->deadline_ns < UINT64_MAX - ns)
            exec->deadline_ns += ns;
        exec->kill_ns += ns;
    }
    next_deadline = 0; /* look again */
}
