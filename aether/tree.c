#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "walk.h"

enum { SPARE_LEAVES = 16 };

static int cgroup_fd = -1;
static uint32_t last_leaf;
static uint32_t
    spare[SPARE_LEAVES]; /* empty leaves to use again: a mkdir and an rmdir saved per command */
static int spares;
static bool
    no_clone3; /* seccomp profiles answer ENOSYS to it, because its flags are behind a pointer */
static bool joined_by_clone;

void tree_init(int fd, int proc_fd) {
    cgroup_fd = fd;
    walk_init(proc_fd);
}

bool tree_has_cgroups(void) { return cgroup_fd >= 0; }

static int leaf_file(const struct tree *tree, const char *file, int flags) {
    char path[64];
    snprintf(path, sizeof path, "aether%u%s%s", tree->leaf, *file ? "/" : "", file);
    return openat(cgroup_fd, path, flags | O_CLOEXEC | O_NOFOLLOW);
}

int tree_open(struct tree *tree) {
    *tree = (struct tree){.empty = {.fd = -1}};
    if (cgroup_fd < 0)
        return 0;
    if (spares > 0) {
        tree->leaf = spare[--spares];
        return 0;
    }
    char name[32];
    for (;;) {
        snprintf(name, sizeof name, "aether%u", ++last_leaf);
        if (mkdirat(cgroup_fd, name, 0755) == 0)
            break;
        if (errno != EEXIST)
            return -errno;
    }
    tree->leaf = last_leaf;
    return 0;
}

pid_t tree_fork(struct tree *tree) {
    joined_by_clone = false;
    int leaf_fd = tree->leaf && !no_clone3 ? leaf_file(tree, "", O_PATH | O_DIRECTORY) : -1;
    pid_t pid = -1;
    if (leaf_fd >= 0) {
        struct clone_args args = {
            .flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (uint64_t)leaf_fd};
        pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
        int error = errno;
        close(leaf_fd);
        joined_by_clone = pid >= 0;
        no_clone3 = pid < 0 && (error == ENOSYS || error == EPERM || error == EINVAL);
        errno = error;
        if (pid < 0 && !no_clone3)
            return pid;
    }
    if (pid < 0)
        pid = fork();
    if (pid > 0)
        tree->leader = pid;
    return pid;
}

int tree_join(const struct tree *tree) {
    if (!tree->leaf || joined_by_clone)
        return 0;
    int fd = leaf_file(tree, "cgroup.procs", O_WRONLY);
    if (fd < 0)
        return -errno;
    int error = write(fd, "0", 1) == 1 ? 0 : -errno;
    close(fd);
    return error;
}

/* Signals other than SIGKILL go to each process of the leaf; one forked meanwhile may miss it. */
static void signal_each(const struct tree *tree, int signal) {
    int fd = leaf_file(tree, "cgroup.procs", O_RDONLY);
    if (fd < 0)
        return;
    char text[4096];
    size_t kept = 0;
    ssize_t got;
    while ((got = read(fd, text + kept, sizeof text - kept - 1)) > 0) {
        text[kept + (size_t)got] = 0;
        char *line = text, *end;
        for (; (end = strchr(line, '\n')); line = end + 1) {
            pid_t pid = (pid_t)strtol(line, NULL, 10);
            if (pid > 1)
                kill(pid, signal);
        }
        kept = strlen(line);
        memmove(text, line, kept);
    }
    close(fd);
}

void tree_signal(struct tree *tree, int signal) {
    if (!tree->leaf) {
        walk_signal(tree->leader, signal);
        return;
    }
    if (signal != SIGKILL) {
        signal_each(tree, signal);
        return;
    }
    int fd = leaf_file(tree, "cgroup.kill", O_WRONLY);
    if (fd < 0)
        return;
    ssize_t ignored = write(fd, "1", 1); /* tree_gone() is what tells */
    (void)ignored;
    close(fd);
    tree->killed = true;
}

bool tree_gone(const struct tree *tree) {
    if (!tree->leaf)
        return walk_gone(tree->leader);
    char text[256];
    int fd = tree->empty.fd >= 0 ? tree->empty.fd : leaf_file(tree, "cgroup.events", O_RDONLY);
    if (fd < 0)
        return errno == ENOENT;
    ssize_t got = pread(fd, text, sizeof text - 1, 0);
    if (fd != tree->empty.fd)
        close(fd);
    if (got < 0)
        return false;
    text[got] = 0;
    return strstr(text, "populated 0") != NULL;
}

void tree_watch(struct tree *tree, void (*changed)(struct source *, uint32_t)) {
    if (!tree->leaf || tree->empty.fd >= 0)
        return;
    tree->empty.fd = leaf_file(tree, "cgroup.events", O_RDONLY);
    tree->empty.ready = changed;
    if (tree->empty.fd >= 0 && loop_add(&tree->empty, EPOLLPRI) < 0) {
        close(tree->empty.fd);
        tree->empty.fd = -1;
    }
}

void tree_close(struct tree *tree) {
    loop_close(&tree->empty);
    /* Since 6.14 a fork compares how often its cgroup was killed, but with CLONE_INTO_CGROUP takes
     * the number from the parent's cgroup: whatever is started in a leaf that was once killed dies
     * at once. */
    if (tree->leaf && !tree->killed && spares < SPARE_LEAVES) {
        spare[spares++] = tree->leaf;
    } else if (tree->leaf) {
        char name[32];
        snprintf(name, sizeof name, "aether%u", tree->leaf);
        unlinkat(cgroup_fd, name, AT_REMOVEDIR);
    }
    tree->leaf = 0;
    tree->leader = 0;
    tree->killed = false;
}
