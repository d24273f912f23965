/* PID 1's duty: collecting every dead process, ours or orphaned; and the two signals the agent
 * listens to. */
#ifndef AETHER_REAP_H
#define AETHER_REAP_H

#include <stdbool.h>

int reap_init(void);
void reap(void);
bool reap_unfinished(void); /* a storm of dead children: go on after the others had their turn */
bool reap_childless(void);

#endif
