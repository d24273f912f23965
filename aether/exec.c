#include "exec.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "conn.h"
#include "index.h"
#include "kept.h"
#include "loop.h"

struct list exec_watched = {&exec_watched, &exec_watched};

static struct exec slots[SLOTS] __attribute__((aligned(4096)));
static int used; /* slots ever used: the others' memory is untouched */
static struct list free_slots = {&free_slots, &free_slots};
static int live;
static struct index by_id, by_stream, by_pid;

/* --- finding --- */

int exec_slot(const struct exec *exec) { return (int)(exec - slots); }

static uint32_t hash(const char *text, uint32_t len) {
    uint32_t value = UINT32_C(2166136261); /* FNV-1a */
    for (uint32_t i = 0; i < len; i++)
        value = (value ^ (uint8_t)text[i]) * UINT32_C(16777619);
    return value;
}

struct exec *exec_by_id(const struct str *id) {
    uint32_t key = hash(id->text, id->len);
    int slot = NO_SLOT;
    while ((slot = index_find(&by_id, key, slot)) != NO_SLOT)
        if (slots[slot].id_len == id->len && memcmp(slots[slot].id, id->text, id->len) == 0)
            return &slots[slot];
    return NULL;
}

struct exec *exec_by_stream(uint32_t stream) {
    int slot = index_find(&by_stream, stream, NO_SLOT);
    return slot == NO_SLOT ? NULL : &slots[slot];
}

struct exec *exec_by_pid(pid_t pid) {
    int slot = index_find(&by_pid, (uint32_t)pid, NO_SLOT);
    return slot == NO_SLOT ? NULL : &slots[slot];
}

void exec_index_stream(struct exec *exec, uint32_t stream) {
    if (exec->stream)
        index_remove(&by_stream, exec_slot(exec));
    exec->stream = stream;
    if (stream)
        index_add(&by_stream, stream, exec_slot(exec));
}

void exec_unindex_pid(struct exec *exec) {
    index_remove(&by_pid, exec_slot(exec));
    exec->pid = 0;
}

/* --- beginning and forgetting --- */

static struct exec *take_slot(void) {
    if (list_empty(&free_slots) && used == SLOTS && !kept_give_record())
        return NULL;
    struct exec *exec;
    if (!list_empty(&free_slots)) {
        exec = container_of(free_slots.next, struct exec, link);
        list_remove(&exec->link);
    } else {
        exec = &slots[used++];
    }
    *exec = (struct exec){.state = EXEC_RUNNING, .tree.empty.fd = -1, .in.pipe.fd = -1};
    exec->out[0].pipe.fd = exec->out[1].pipe.fd = -1;
    list_init(&exec->ready);
    list_append(&exec_watched, &exec->link);
    live++;
    return exec;
}

void exec_release(struct exec *exec) {
    if (exec->id_len)
        index_remove(&by_id, exec_slot(exec));
    exec_index_stream(exec, 0);
    if (exec->pid)
        exec_unindex_pid(exec);
    list_remove(&exec->ready);
    if (exec->state == EXEC_RUNNING)
        live--;
    else
        kept_remove(exec);
    output_close(&exec->out[0]);
    output_close(&exec->out[1]);
    input_close(&exec->in);
    tree_close(&exec->tree);
    exec->state = EXEC_FREE;
    list_remove(&exec->link);
    list_append(&free_slots, &exec->link);
}

void exec_ended(struct exec *exec) {
    exec->state = EXEC_ENDED;
    live--;
    queue_keep(&exec->out[0].ring);
    queue_keep(&exec->out[1].ring);
    kept_add(exec);
}

void exec_rest(void) {
    if (live + kept_count() > 0)
        return;
    list_init(&free_slots);
    madvise(slots, sizeof slots, MADV_DONTNEED);
    used = 0;
}

static bool promise(struct queue *queue, uint32_t chunks) {
    while (!queue_open(queue, chunks))
        if (!kept_give_output())
            return false;
    return true;
}

/* pipes[i] = {the command's end, ours}; ours does not block. */
static int open_pipes(int pipes[3][2], bool stdin_pipe) {
    for (int i = stdin_pipe ? 0 : 1; i < 3; i++) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC) < 0)
            return -errno;
        pipes[i][0] = ends[i == 0 ? 0 : 1];
        pipes[i][1] = ends[i == 0 ? 1 : 0];
        fcntl(pipes[i][1], F_SETFL, O_NONBLOCK);
    }
    return 0;
}

static int begin(struct exec *exec, const struct exec_options *options, const struct job *job) {
    if (!promise(&exec->out[0].ring, 1) || !promise(&exec->out[1].ring, 1) ||
        (options->stdin_pipe && !promise(&exec->in.waiting, STDIN_CHUNKS)))
        return -ENOBUFS;
    int error = tree_open(&exec->tree);
    if (error)
        return error;
    int pipes[3][2] = {{-1, -1}, {-1, -1}, {-1, -1}};
    error = open_pipes(pipes, options->stdin_pipe);
    input_open(&exec->in, exec, pipes[0][1]);
    int first = output_open(&exec->out[0], exec, pipes[1][1], options->capture);
    int second = output_open(&exec->out[1], exec, pipes[2][1], options->capture);
    error = error ? error : first ? first : second;
    int stdio[3] = {pipes[0][0], pipes[1][0], pipes[2][0]};
    pid_t pid = error ? error : spawn(job, &exec->tree, stdio, spawn_report(exec_slot(exec)));
    for (int i = 0; i < 3; i++)
        if (stdio[i] >= 0)
            close(stdio[i]);
    if (pid < 0)
        return pid;
    exec->pid = pid;
    index_add(&by_pid, (uint32_t)pid, exec_slot(exec));
    return 0;
}

struct exec *exec_start(const struct exec_options *options, const struct job *job, int *error) {
    struct exec *exec = live < MAX_LIVE ? take_slot() : NULL;
    if (exec)
        exec->started_ns = now_ns(); /* the fork is part of it */
    *error = exec ? -begin(exec, options, job) : EAGAIN;
    if (*error) {
        if (exec)
            exec_release(exec);
        return NULL;
    }
    exec->is_file = job->is_file;
    exec->digest = options->digest;
    exec->id_len = options->id.len;
    memcpy(exec->id, options->id.text, options->id.len);
    if (exec->id_len)
        index_add(&by_id, hash(exec->id, exec->id_len), exec_slot(exec));
    exec_started(exec, options->timeout_ms);
    exec_attach(exec, options->stream, options->credit, options->watch);
    return exec;
}

void exec_detach_all(void) {
    for (int slot = 0; slot < used; slot++) {
        struct exec *exec = &slots[slot];
        memset(exec->kill_streams, 0, sizeof exec->kill_streams);
        if (exec->state != EXEC_FREE && exec->stream)
            exec_detach(exec);
    }
}

void exec_list(void) {
    uint32_t count = 0;
    for (int slot = 0; slot < used; slot++)
        count += slots[slot].state != EXEC_FREE && !slots[slot].is_file;
    out_u32(count);
    for (int slot = 0; slot < used; slot++) {
        const struct exec *exec = &slots[slot];
        if (exec->state == EXEC_FREE || exec->is_file)
            continue;
        bool running = exec->state == EXEC_RUNNING;
        out_str(exec->id, exec->id_len);
        out_u32((uint32_t)exec->pid);
        enum process_state ended = exec->tree.leader ? PROCESS_CHILDREN_LEFT : PROCESS_ENDED;
        out_u8((uint8_t)(running ? PROCESS_RUNNING : ended));
        out_u64(exec->started_ns);
        out_u64(running ? 0 : exec->ended_ns);
        for (int i = 0; i < 2; i++) {
            out_u64(exec->out[i].total);
            out_u64(exec->out[i].start);
        }
    }
}
