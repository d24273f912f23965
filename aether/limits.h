/* Every bound of the agent in one place. PID 1 allocates nothing after its start: tables are
 * static, buffers come from one pool, so no sandbox can make it run out of memory of its own. */
#ifndef AETHER_LIMITS_H
#define AETHER_LIMITS_H

#include <stdint.h>

#define MS UINT64_C(1000000)
#define SECOND (1000 * MS)

enum {
    SLOTS = 2048,    /* records: running or kept */
    MAX_LIVE = 1024, /* commands and file operations under way */
    MAX_READ = 384,  /* ended, and read by an edge; those not read yet are no more than could run */
    KILL_WAITERS = 4, /* KILL requests waiting for one tree to be gone */

    CHUNK = 16 * 1024, /* unit of the buffer pool */
    POOL_MIB = 64,     /* default size of the pool; only what is touched takes memory */
    HOT_CHUNKS = 4,    /* free chunks whose pages are kept */
    RING_CHUNKS = 65,  /* one more than 1 MiB, so that a whole MiB is always kept */
    RING_BYTES = 1024 * 1024,
    STDIN_WINDOW = 64 * 1024,
    STDIN_CHUNKS = 5, /* a window that starts in the middle of a chunk */
    RETAIN_BYTES = 8 * 1024 * 1024,
    RETAIN_S = 900,      /* a record */
    RETAIN_READ_S = 300, /* its output, once an edge has had it */

    PIPE_READ = 64 * 1024, /* one read from a pipe: its usual capacity */
    READS_PER_EVENT = 4,   /* then others have their turn */
    OUTPUT_FRAME = 32 * 1024,
    OUT_LOW = 64 * 1024,   /* nothing is queued for the edge, nor a request taken, above this */
    OUT_SIZE = 640 * 1024, /* OUT_LOW and the largest answers (LIST of all records) */

    REAP_BATCH = 256,
    PASSWD_MAX = 4 * 1024 * 1024,
    MAX_GROUPS = 256,
    MAX_DEPTH = 1024, /* of a tree that REMOVE descends into */
};

#define DRAIN_IDLE                                                                                 \
    (100 * MS) /* silence after which pipes held by children left behind are let go */
#define DRAIN_MAX (2 * SECOND)
#define KILL_WAIT                                                                                  \
    (10 * SECOND) /* processes that survive SIGKILL for so long are reported, not waited for */
#define WALK_POLL (10 * MS)     /* without a cgroup nobody tells us that a tree is gone */
#define FILE_GRACE (2 * SECOND) /* for a file operation that was given up, before it is killed */
#define OUTER_TERM_GRACE (2 * SECOND)

#endif
