/* Paths of the sandbox, resolved inside its root whatever links say. */
#ifndef AETHER_ROOT_H
#define AETHER_ROOT_H

#include <stdint.h>
#include <sys/types.h>

int root_init(void); /* keeps a descriptor of "/" */
int root_fd(void);
void root_adopt(int fd); /* a child moved it */

/* openat2 in the root; `flags` get O_CLOEXEC. Returns the descriptor or -errno. */
int root_open(const char *path, int flags, mode_t mode);

/* The whole regular file, NUL-terminated, in memory of the caller's own process; NULL and *error
 * otherwise. */
char *root_slurp(const char *path, int *error);

#endif
