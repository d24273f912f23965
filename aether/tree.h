/* The processes of one command: a leaf cgroup below the sandbox's own, reached through a directory
 * descriptor because no cgroupfs is visible inside. Without that descriptor (tests), the leader's
 * session and descendants (walk.c). */
#ifndef AETHER_TREE_H
#define AETHER_TREE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "loop.h"

struct tree {
    uint32_t leaf;       /* number in the leaf's name; 0: none */
    bool killed;         /* the leaf was: it is not used again */
    pid_t leader;        /* also its session's id; stays after the leader was reaped */
    struct source empty; /* cgroup.events, while somebody waits for the tree to be gone */
};

void tree_init(int cgroup_fd, int proc_fd);
bool tree_has_cgroups(void);

int tree_open(struct tree *tree);
pid_t tree_fork(struct tree *tree); /* 0 in the child, which is in the leaf or has to tree_join() */
int tree_join(const struct tree *tree);
void tree_signal(struct tree *tree, int signal);
bool tree_gone(const struct tree *tree);
void tree_watch(struct tree *tree, void (*changed)(struct source *, uint32_t));
void tree_close(struct tree *tree); /* only when gone, or never entered */

#endif
