#include "output.h"

#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "conn.h"
#include "exec.h"
#include "kept.h"
#include "limits.h"

static uint8_t scratch[PIPE_READ];

static void ready(struct source *source, uint32_t events) {
    (void)events;
    struct output *output = container_of(source, struct output, pipe);
    output_read(output, READS_PER_EVENT);
    exec_check(output->exec);
}

int output_open(struct output *output, struct exec *exec, int fd, uint64_t capture) {
    struct queue ring = output->ring; /* opened at admission */
    *output = (struct output){
        .pipe = {.fd = fd, .ready = ready}, .exec = exec, .ring = ring, .capture = capture};
    return fd < 0 ? 0 : loop_add(&output->pipe, EPOLLIN);
}

/* Drops the oldest chunk if nobody is owed it. */
static bool make_room(struct output *output) {
    if (output->ring.count == 0)
        return false;
    size_t front;
    queue_front(&output->ring, &front);
    uint64_t after = output->start + front;
    if (exec_has_reader(output->exec) && after > output->next)
        return false;
    queue_drop_head(&output->ring);
    if (after > output->delivered) {
        uint64_t seen = output->delivered > output->start ? output->delivered : output->start;
        output->dropped += after - seen;
    }
    output->start = after;
    if (output->next < after)
        output->next = after;
    return true;
}

/* How much of the next read can be stored; 0: the ring is full of bytes somebody waits for. */
static size_t room(struct output *output) {
    for (;;) {
        size_t bytes = queue_room(&output->ring, RING_CHUNKS);
        if (bytes >= CHUNK / 2)
            return bytes;
        bool pool_empty = output->ring.count < RING_CHUNKS;
        if (!(pool_empty && kept_give_output()) && !make_room(output))
            return bytes;
    }
}

static void block(struct output *output) {
    /* Removed, not masked: a hang-up would be reported all the same, for ever. */
    loop_remove(&output->pipe);
    output->blocked = true;
}

void output_read(struct output *output, int reads) {
    for (; reads > 0 && output_is_open(output) && !output->blocked; reads--) {
        bool store = !output->discard && output->total < output->capture;
        size_t want = sizeof scratch;
        if (store) {
            uint64_t left = output->capture - output->total;
            size_t space = room(output);
            want = space < want ? space : want;
            want = left < want ? (size_t)left : want;
            if (want == 0) {
                block(output);
                return;
            }
        }
        ssize_t got = read(output->pipe.fd, scratch, want);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (got <= 0) {
            loop_close(&output->pipe);
            return;
        }
        if (store)
            queue_append(&output->ring, scratch, (size_t)got);
        if (!output->discard) {
            output->total += (uint64_t)got;
            output->exec->idle_ns = now_ns() + DRAIN_IDLE;
            exec_wake(output->exec);
        }
    }
}

void output_seek(struct output *output, uint64_t offset) {
    uint64_t end = output_end(output);
    output->next = offset < output->start ? output->start : offset > end ? end : offset;
}

bool output_pending(const struct output *output) { return output->next < output_end(output); }

uint32_t output_send(struct output *output, uint8_t which, uint32_t stream, uint32_t credit) {
    uint64_t waiting = output_end(output) - output->next;
    uint32_t len = waiting < OUTPUT_FRAME ? (uint32_t)waiting : OUTPUT_FRAME;
    len = credit < len ? credit : len;
    if (len == 0)
        return 0;
    out_begin(FRAME_OUTPUT, stream);
    out_u8(which);
    out_u64(output->next);
    void *to = out_reserve(len);
    if (to)
        queue_copy(&output->ring, (size_t)(output->next - output->start), to, len);
    out_end();
    output->next += len;
    if (output->delivered < output->next)
        output->delivered = output->next;
    return len;
}

void output_unblock(struct output *output) {
    if (!output->blocked)
        return;
    output->blocked = false;
    output->exec->idle_ns = now_ns() + DRAIN_IDLE; /* the silence was ours */
    output->exec->drain_ns = now_ns() + DRAIN_MAX;
    if (loop_add(&output->pipe, EPOLLIN) < 0)
        loop_close(&output->pipe);
}

void output_discard(struct output *output) {
    output->discard = true;
    output_unblock(output);
}

void output_forget(struct output *output) {
    uint64_t end = output_end(output);
    if (end > output->delivered)
        output->dropped +=
            end - (output->delivered > output->start ? output->delivered : output->start);
    queue_close(&output->ring);
    output->start = output->next = end;
}

void output_close(struct output *output) {
    if (output->blocked) { /* already out of the epoll set */
        close(output->pipe.fd);
        output->pipe.fd = -1;
        output->blocked = false;
    }
    loop_close(&output->pipe);
    queue_close(&output->ring);
}
