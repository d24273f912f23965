#include "walk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_WALK = 4096 };

static int proc_fd = -1;
static pid_t members[MAX_WALK];
static int count;

void walk_init(int fd) { proc_fd = fd; }

static bool is_member(pid_t pid) {
    for (int i = 0; i < count; i++)
        if (members[i] == pid)
            return true;
    return false;
}

/* A zombie is gone: only its parent can do more about it. */
static bool belongs(pid_t pid, pid_t leader) {
    char path[32], text[512];
    snprintf(path, sizeof path, "%d/stat", pid);
    int fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0)
        return false;
    text[got] = 0;
    char *fields = strrchr(text, ')'); /* the name may contain anything */
    char state;
    int parent, group, session;
    if (!fields || sscanf(fields + 1, " %c %d %d %d", &state, &parent, &group, &session) != 4 ||
        state == 'Z')
        return false;
    return pid == leader || session == leader || is_member(parent);
}

/* One pass over /proc; true if it found a member not known before. */
static bool pass(pid_t leader) {
    bool found = false;
    char entries[4096];
    long got;
    lseek(proc_fd, 0, SEEK_SET);
    while ((got = syscall(SYS_getdents64, proc_fd, entries, sizeof entries)) > 0) {
        for (long at = 0; at < got && count < MAX_WALK;) {
            const struct dirent *entry = (const struct dirent *)(entries + at);
            pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
            if (pid > 1 && !is_member(pid) && belongs(pid, leader)) {
                members[count++] = pid;
                found = true;
            }
            at += entry->d_reclen;
        }
    }
    return found;
}

static void walk(pid_t leader) {
    count = 0;
    while (leader > 0 && proc_fd >= 0 && pass(leader)) {
    }
}

void walk_signal(pid_t leader, int signal) {
    walk(leader);
    for (int i = 0; i < count; i++)
        kill(members[i], signal);
}

bool walk_gone(pid_t leader) {
    walk(leader);
    return count == 0;
}
