/* A pool of fixed chunks and byte queues made of them: all output and input waiting in the agent.
 * Invariant: `promised` chunks, given out as quotas when a command was admitted, are always free to
 * be taken. */
#ifndef AETHER_BUFFER_H
#define AETHER_BUFFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct queue {
    uint32_t head, tail; /* chunk numbers, meaningless while count is 0 */
    uint32_t count;      /* chunks held */
    uint32_t quota;      /* chunks promised to this queue */
    uint32_t skip;       /* bytes of the head chunk already consumed */
    uint32_t fill;       /* bytes in the tail chunk */
};

bool pool_init(size_t bytes);
size_t pool_bytes(void);

bool queue_open(struct queue *q, uint32_t quota); /* false: the pool cannot promise so much */
void queue_keep(struct queue *q);                 /* gives the quota back, keeps the bytes */
void queue_close(struct queue *q);                /* gives everything back */

size_t queue_bytes(const struct queue *q);
size_t queue_room(const struct queue *q, uint32_t max_chunks);
void queue_append(struct queue *q, const void *data, size_t len); /* len <= queue_room() */
size_t queue_drop_head(struct queue *q); /* whole chunk; returns its bytes */
void queue_copy(const struct queue *q, size_t from, void *to, size_t len);
const void *queue_front(const struct queue *q, size_t *len);
void queue_consume(struct queue *q, size_t len);

#endif
