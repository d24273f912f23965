/* A command's stdin pipe: at most one window of bytes on their way from the edge. Bytes have
 * offsets, as output has: what a retry sends a second time is recognised and skipped. */
#ifndef AETHER_INPUT_H
#define AETHER_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buffer.h"
#include "loop.h"

struct exec;

struct input {
    struct source pipe; /* fd -1: not a pipe, or closed */
    struct exec *exec;
    struct queue waiting;
    uint64_t received; /* bytes the edge has sent */
    uint64_t written;  /* of these, in the pipe or thrown away */
    uint64_t told;     /* offset the edge knows it may send up to */
    bool is_pipe;
    bool closing; /* close when all is written */
    bool watching;
};

void input_open(struct input *input, struct exec *exec, int fd);
bool input_write(struct input *input, uint64_t offset, const void *data,
                 size_t len); /* false: outside the window */
void input_finish(struct input *input);
bool input_credit_due(const struct input *input);
void input_send_credit(struct input *input, uint32_t stream);
void input_close(struct input *input);

#endif
