#include "buffer.h"

#include <string.h>
#include <sys/mman.h>

#include "limits.h"

static struct {
    uint8_t *memory;
    uint32_t *next; /* link of each chunk: in the free list or in its queue */
    uint32_t size, free, promised;
    uint32_t free_head;
    uint32_t hot; /* upper bound of free chunks that still hold pages */
} pool;

bool pool_init(size_t bytes) {
    pool.size = (uint32_t)(bytes / CHUNK);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    pool.memory = mmap(NULL, (size_t)pool.size * CHUNK, PROT_READ | PROT_WRITE, flags, -1, 0);
    pool.next = mmap(NULL, pool.size * sizeof *pool.next, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (pool.memory == MAP_FAILED || pool.next == MAP_FAILED)
        return false;
    /* Children need none of it: fork stays cheap and no child sees another command's output. */
    madvise(pool.memory, (size_t)pool.size * CHUNK, MADV_DONTFORK);
    pool.free = pool.size;
    return true;
}

size_t pool_bytes(void) { return (size_t)pool.size * CHUNK; }

static uint8_t *chunk_at(uint32_t chunk) { return pool.memory + (size_t)chunk * CHUNK; }

/* The free list holds chunk+1, and 0 in a fresh mapping means "the one after me": nothing is
 * touched at the start. */
static uint32_t take(void) {
    uint32_t chunk = pool.free_head;
    pool.free_head = pool.next[chunk] ? pool.next[chunk] - 1 : chunk + 1;
    pool.free--;
    if (pool.hot > 0)
        pool.hot--;
    return chunk;
}

static void give(uint32_t chunk) {
    if (pool.hot < HOT_CHUNKS)
        pool.hot++;
    else
        madvise(chunk_at(chunk), CHUNK, MADV_DONTNEED);
    pool.next[chunk] = pool.free_head + 1;
    pool.free_head = chunk;
    pool.free++;
}

bool queue_open(struct queue *q, uint32_t quota) {
    if (pool.free - pool.promised < quota)
        return false;
    pool.promised += quota;
    *q = (struct queue){.quota = quota};
    return true;
}

void queue_keep(struct queue *q) {
    if (q->count < q->quota)
        pool.promised -= q->quota - q->count;
    q->quota = 0;
}

void queue_close(struct queue *q) {
    queue_keep(q);
    while (q->count > 0)
        queue_drop_head(q);
}

size_t queue_bytes(const struct queue *q) {
    return q->count ? (size_t)(q->count - 1) * CHUNK + q->fill - q->skip : 0;
}

size_t queue_room(const struct queue *q, uint32_t max_chunks) {
    uint32_t own = q->count < q->quota ? q->quota - q->count : 0;
    uint32_t more = own + pool.free - pool.promised;
    uint32_t allowed = q->count < max_chunks ? max_chunks - q->count : 0;
    size_t tail = q->count ? CHUNK - q->fill : 0;
    return tail + (size_t)(more < allowed ? more : allowed) * CHUNK;
}

static void grow(struct queue *q) {
    if (q->count < q->quota)
        pool.promised--;
    uint32_t chunk = take();
    if (q->count == 0) {
        q->head = chunk;
        q->skip = 0;
    } else {
        pool.next[q->tail] = chunk;
    }
    q->tail = chunk;
    q->fill = 0;
    q->count++;
}

void queue_append(struct queue *q, const void *data, size_t len) {
    const uint8_t *from = data;
    while (len > 0) {
        if (q->count == 0 || q->fill == CHUNK)
            grow(q);
        size_t part = CHUNK - q->fill < len ? CHUNK - q->fill : len;
        memcpy(chunk_at(q->tail) + q->fill, from, part);
        q->fill += (uint32_t)part;
        from += part;
        len -= part;
    }
}

size_t queue_drop_head(struct queue *q) {
    size_t bytes = (q->count == 1 ? q->fill : CHUNK) - q->skip;
    uint32_t chunk = q->head;
    q->head = pool.next[chunk];
    q->count--;
    q->skip = 0;
    give(chunk);
    if (q->count < q->quota)
        pool.promised++;
    return bytes;
}

void queue_copy(const struct queue *q, size_t from, void *to, size_t len) {
    uint32_t chunk = q->head;
    size_t at = q->skip + from;
    for (; at >= CHUNK; at -= CHUNK)
        chunk = pool.next[chunk];
    for (uint8_t *out = to; len > 0; chunk = pool.next[chunk], at = 0) {
        size_t part = CHUNK - at < len ? CHUNK - at : len;
        memcpy(out, chunk_at(chunk) + at, part);
        out += part;
        len -= part;
    }
}

const void *queue_front(const struct queue *q, size_t *len) {
    *len = q->count ? (q->count == 1 ? q->fill : CHUNK) - q->skip : 0;
    return q->count ? chunk_at(q->head) + q->skip : NULL;
}

void queue_consume(struct queue *q, size_t len) {
    q->skip += (uint32_t)len;
    if (q->count > 0 && q->skip == (q->count == 1 ? q->fill : CHUNK))
        queue_drop_head(q);
}
