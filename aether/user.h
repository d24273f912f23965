/* Who a command runs as, from the sandbox's own /etc/passwd and /etc/group. Only called in a forked
 * child: the files belong to the sandbox and may be large, slow or strange. */
#ifndef AETHER_USER_H
#define AETHER_USER_H

#include <sys/types.h>

#include "limits.h"

struct identity {
    uid_t uid;
    gid_t gid;
    gid_t groups[MAX_GROUPS];
    int group_count;
    const char *home; /* NULL: no entry */
};

/* `user` is "", "name", "uid" and optionally ":group" or ":gid". Returns 0 or an errno; ENOENT:
 * unknown. */
int user_resolve(const char *user, struct identity *identity);

#endif
