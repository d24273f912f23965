/* Finding a tree of processes in /proc: the fallback for an agent without a cgroup descriptor. A
 * process that has left both the session and its parents (a daemon) is not found, which is why
 * production has the cgroup. */
#ifndef AETHER_WALK_H
#define AETHER_WALK_H

#include <stdbool.h>
#include <sys/types.h>

void walk_init(int proc_fd);
void walk_signal(pid_t leader, int signal);
bool walk_gone(pid_t leader);

#endif
