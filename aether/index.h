/* Finds a record by a 32-bit key (pid, stream, hash of an exec id): chains over slot numbers, no
 * allocation. */
#ifndef AETHER_INDEX_H
#define AETHER_INDEX_H

#include <stdint.h>

#include "limits.h"

#define BUCKETS 1024
#define NO_SLOT (-1)

struct index {
    int16_t first[BUCKETS]; /* slot + 1, so that zeroed memory is an empty index */
    int16_t next[SLOTS];
    uint32_t key[SLOTS];
};

static inline uint32_t index_bucket(uint32_t key) { return (key * UINT32_C(2654435761)) >> 22; }

static inline void index_add(struct index *ix, uint32_t key, int slot) {
    int16_t *first = &ix->first[index_bucket(key)];
    ix->key[slot] = key;
    ix->next[slot] = *first;
    *first = (int16_t)(slot + 1);
}

static inline void index_remove(struct index *ix, int slot) {
    int16_t *link = &ix->first[index_bucket(ix->key[slot])];
    while (*link && *link != slot + 1)
        link = &ix->next[*link - 1];
    if (*link)
        *link = ix->next[slot];
}

/* The next slot with this key after `slot`, or the first one after NO_SLOT. */
static inline int index_find(const struct index *ix, uint32_t key, int slot) {
    int at = slot == NO_SLOT ? ix->first[index_bucket(key)] : ix->next[slot];
    while (at && ix->key[at - 1] != key)
        at = ix->next[at - 1];
    return at - 1;
}

#endif
