/* The one epoll of the one thread, and the clock everything is measured by. */
#ifndef AETHER_LOOP_H
#define AETHER_LOOP_H

#include <stdint.h>

/* Embedded in what owns a descriptor. Owners are static and callbacks tolerate a spurious call, so
 * an event that was collected before its descriptor was closed or replaced does no harm. */
struct source {
    int fd; /* -1: closed */
    void (*ready)(struct source *source, uint32_t events);
};

int loop_init(void);
int loop_add(struct source *source, uint32_t events);
void loop_modify(struct source *source, uint32_t events);
void loop_remove(struct source *source); /* stops watching */
void loop_close(struct source *source);  /* stops watching and closes */
void loop_wait(uint64_t until_ns);       /* one round of events; UINT64_MAX: no deadline */

uint64_t now_ns(void);

#endif
