/*
 * dsec-launch: the few steps between the edge and the container runtime that must happen in a
 * process of their own, then the runtime itself, in the same process.
 *
 *   dsec-launch ROOT_FD TARGET NETNS_FD EXEC_FD CGROUP2 PROCS_FILE... -- ARGV0 ARG...
 *
 * 1. takes a mount namespace of its own and puts the detached mount ROOT_FD on TARGET in it, so
 *    that a sandbox's root is never in a mount table that outlives its start;
 * 2. where CGROUP2 is 1, covers /sys/fs/cgroup with a cgroup2 mount: crun refuses the hybrid
 *    layout, and with its cgroup manager disabled it wants nothing else from there;
 * 3. joins every PROCS_FILE; children inherit, so the sandbox's first page is already charged;
 * 4. joins NETNS_FD unless it is -1;
 * 5. becomes EXEC_FD (the runtime in a sealed memfd) with everything above descriptor 5 closed
 *    and /dev/null (its standard input) for output.
 *
 * A program and not Python between fork and exec, because the edge is a process of many threads;
 * small and static, because it is paid for with every create. Exits 127 with one line on stderr.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_move_mount
#define SYS_move_mount 429
#endif
#define EMPTY_SOURCE_PATH 0x4 /* MOVE_MOUNT_F_EMPTY_PATH */
#define FIRST_PRIVATE_FD 6    /* 3, 4 and 5 are the agent's */

static int complaints = STDERR_FILENO;

static void die(const char *what, const char *object)
{
    dprintf(complaints, "dsec-launch: %s %s: %s\n", what, object, strerror(errno));
    _exit(127);
}

/* The sandbox's first process keeps what the runtime has for output: only /dev/null will do. */
static void silence(void)
{
    complaints = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, FIRST_PRIVATE_FD);
    if (complaints < 0 || dup2(STDIN_FILENO, STDOUT_FILENO) < 0 ||
        dup2(STDIN_FILENO, STDERR_FILENO) < 0)
        die("silence", "output");
}

static void place_root(int root_fd, const char *target, int cover_cgroup)
{
    if (unshare(CLONE_NEWNS) != 0)
        die("unshare", "mount namespace");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        die("make private", "/");
    if (cover_cgroup && mount("none", "/sys/fs/cgroup", "cgroup2", 0, NULL) != 0)
        die("mount cgroup2 on", "/sys/fs/cgroup");
    if (syscall(SYS_move_mount, root_fd, "", AT_FDCWD, target, EMPTY_SOURCE_PATH) != 0)
        die("move the root to", target);
}

static void join(const char *procs_file)
{
    int fd = open(procs_file, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "0", 1) != 1)
        die("join", procs_file);
    close(fd);
}

int main(int argc, char **argv)
{
    extern char **environ;
    int next = 6;

    if (argc < 8) {
        errno = EINVAL;
        die("too few", "arguments");
    }
    place_root(atoi(argv[1]), argv[2], atoi(argv[5]));
    for (; next < argc && strcmp(argv[next], "--") != 0; next++)
        join(argv[next]);
    int netns_fd = atoi(argv[3]);
    if (netns_fd >= 0 && setns(netns_fd, CLONE_NEWNET) != 0)
        die("join", "network namespace");
    if (next + 1 >= argc) {
        errno = EINVAL;
        die("nothing to execute after", "--");
    }
    silence();
    if (close_range(FIRST_PRIVATE_FD, ~0U, CLOSE_RANGE_CLOEXEC) != 0)
        die("close_range", "6..");
    execveat(atoi(argv[4]), "", argv + next + 1, environ, AT_EMPTY_PATH);
    die("execute", argv[next + 1]);
}
