/* One of a command's two output pipes: its ring of captured bytes, and what of it the edge has
 * seen. */
#ifndef AETHER_OUTPUT_H
#define AETHER_OUTPUT_H

#include <stdbool.h>
#include <stdint.h>

#include "buffer.h"
#include "loop.h"

struct exec;

struct output {
    struct source pipe;
    struct exec *exec;
    struct queue ring;
    uint64_t total;     /* bytes read from the pipe */
    uint64_t capture;   /* bytes from this offset on are only counted */
    uint64_t start;     /* offset of the ring's first byte */
    uint64_t next;      /* offset of the next byte to send */
    uint64_t delivered; /* the furthest `next` has been, over all connections */
    uint64_t dropped;   /* captured bytes lost before they were delivered */
    bool blocked;       /* full of unsent bytes: the pipe is not watched */
    bool discard;       /* EXIT was decided: whatever still comes is thrown away */
};

int output_open(struct output *output, struct exec *exec, int fd,
                uint64_t capture); /* 0 or -errno */
void output_read(struct output *output, int reads);
void output_seek(struct output *output, uint64_t offset);
bool output_pending(const struct output *output);
uint32_t output_send(struct output *output, uint8_t which, uint32_t stream, uint32_t credit);
void output_unblock(struct output *output);
void output_discard(struct output *output); /* from now on */
void output_forget(struct output *output);  /* drops what is kept, keeps the numbers */
void output_close(struct output *output);

static inline bool output_is_open(const struct output *output) { return output->pipe.fd >= 0; }
static inline uint64_t output_end(const struct output *output) {
    return output->start + queue_bytes(&output->ring);
}

#endif
