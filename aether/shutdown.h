/* The end of the sandbox: TERM to everything, a grace, KILL to everything, and the agent exits with
 * the last of them. */
#ifndef AETHER_SHUTDOWN_H
#define AETHER_SHUTDOWN_H

#include <stdbool.h>
#include <stdint.h>

void shutdown_begin(uint32_t stream, uint64_t grace_ns);
bool shutdown_begun(void);
uint64_t shutdown_next_deadline(void);
void shutdown_tick(void); /* does not return when it is over */

#endif
