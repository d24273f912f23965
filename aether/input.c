#include "input.h"

#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "conn.h"
#include "exec.h"
#include "limits.h"

bool input_credit_due(const struct input *input) {
    return input->is_pipe && input->written + STDIN_WINDOW - input->told >= STDIN_WINDOW / 4;
}

static void advance(struct input *input, uint64_t written) {
    input->written = written;
    if (input_credit_due(input))
        exec_wake(input->exec);
}

/* The reader is gone, or all was written: what still comes is swallowed, so that nobody waits. */
static void shut(struct input *input) {
    if (input->pipe.fd < 0)
        return;
    if (input->watching)
        loop_remove(&input->pipe);
    close(input->pipe.fd);
    input->pipe.fd = -1;
    input->watching = false;
    queue_close(&input->waiting);
    advance(input, input->received);
}

static void flush(struct input *input) {
    while (input->pipe.fd >= 0) {
        size_t len;
        const void *data = queue_front(&input->waiting, &len);
        if (len == 0)
            break;
        ssize_t sent = write(input->pipe.fd, data, len);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno == EAGAIN) {
            if (!input->watching)
                input->watching = loop_add(&input->pipe, EPOLLOUT) == 0;
            return;
        }
        if (sent < 0) {
            shut(input);
            return;
        }
        queue_consume(&input->waiting, (size_t)sent);
        advance(input, input->written + (uint64_t)sent);
    }
    if (input->watching)
        loop_remove(&input->pipe);
    input->watching = false;
    if (input->closing)
        shut(input);
}

static void ready(struct source *source, uint32_t events) {
    (void)events;
    flush(container_of(source, struct input, pipe));
}

void input_open(struct input *input, struct exec *exec, int fd) {
    struct queue waiting = input->waiting; /* opened at admission */
    *input = (struct input){.pipe = {.fd = fd, .ready = ready}, .exec = exec, .waiting = waiting};
    input->is_pipe = fd >= 0;
    input->told = input->is_pipe ? STDIN_WINDOW : 0;
}

bool input_write(struct input *input, uint64_t offset, const void *data, size_t len) {
    if (offset > input->received || offset > input->told || len > input->told - offset)
        return false;
    uint64_t again = input->received - offset;
    if (again >= len)
        return true;
    input->received = offset + len;
    if (input->pipe.fd < 0 || input->closing) {
        advance(input, input->received);
        return true;
    }
    queue_append(&input->waiting, (const uint8_t *)data + again, len - (size_t)again);
    flush(input);
    return true;
}

void input_finish(struct input *input) {
    input->closing = true;
    flush(input);
}

void input_send_credit(struct input *input, uint32_t stream) {
    input->told = input->written + STDIN_WINDOW;
    out_begin(FRAME_STDIN_CREDIT, stream);
    out_u64(input->told);
    out_end();
}

void input_close(struct input *input) {
    shut(input);
    queue_close(&input->waiting);
}
