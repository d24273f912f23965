/* Capabilities: what the agent keeps, what commands can ever have, and becoming a user. */
#ifndef AETHER_PRIVILEGE_H
#define AETHER_PRIVILEGE_H

#include <stdbool.h>
#include <stdint.h>

#include "user.h"

uint64_t privilege_default_caps(void);

/* At the start, before anything untrusted exists: shrinks the bounding set to `caps` less those
 * that are never given, and the agent's own sets to what it needs. Returns 0 or -errno; the agent
 * must not run if it fails. */
int privilege_init(uint64_t caps);

/* In a child: becomes the user. `keep_caps`: without an exec to come, so root gets exactly what its
 * commands get. */
int privilege_become(const struct identity *identity, bool keep_caps);

#endif
