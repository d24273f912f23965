/*
 * dsec-launch: the few steps between the edge and the container runtime that must happen in a
 * process of their own, then the runtime itself.
 *
 *   dsec-launch ROOT_FD TARGET NETNS_FD EXEC_FD COVER BOX PROCS_FILE... -- ARGV0 ARG...
 *
 * 1. creates a child inside the v2 cgroup BOX: being created there takes no lock that a fork
 *    elsewhere waits for, where moving there waits for every processor to pass a quiet point;
 * 2. the child joins every PROCS_FILE (v1 hierarchies, which offer nothing better);
 * 3. takes a mount namespace of its own and puts the detached mount ROOT_FD on TARGET in it, so
 *    that a sandbox's root is never in a mount table that outlives its start;
 * 4. where COVER is 1, covers /sys/fs/cgroup with a cgroup2 mount: crun refuses the hybrid
 *    layout, and with its cgroup manager disabled it wants nothing else from there;
 * 5. joins NETNS_FD unless it is -1;
 * 6. becomes EXEC_FD (the runtime in a sealed memfd) with everything above descriptor 6 closed
 *    and /dev/null (its standard input) for output.
 *
 * A program and not Python between fork and exec, because the edge is a process of many threads;
 * small and static, because it is paid for with every create. Exits as the child does, 127 with
 * one line on stderr if the runtime was not reached.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define EMPTY_SOURCE_PATH 0x4 /* MOVE_MOUNT_F_EMPTY_PATH */
#define FIRST_PRIVATE_FD 7    /* 3, 4 and 5 are the agent's, 6 is the runtime's configuration */

enum { ROOT_FD = 1, TARGET, NETNS_FD, EXEC_FD, COVER, BOX, FIRST_PROCS_FILE };

static int complaints = STDERR_FILENO;

static void die(const char *what, const char *object)
{
    dprintf(complaints, "dsec-launch: %s %s: %s\n", what, object, strerror(errno));
    _exit(127);
}

static pid_t fork_into(const char *cgroup)
{
    int fd = open(cgroup, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        die("open", cgroup);
    struct clone_args args = {
        .flags = CLONE_INTO_CGROUP,
        .exit_signal = SIGCHLD,
        .cgroup = (uint64_t)fd,
    };
    pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof(args));
    if (pid < 0)
        die("fork into", cgroup);
    return pid;
}

static void join(const char *procs_file)
{
    int fd = open(procs_file, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "0", 1) != 1)
        die("join", procs_file);
    close(fd);
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

/* The sandbox's first process keeps what the runtime has for output: only /dev/null will do. */
static void silence(void)
{
    complaints = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, FIRST_PRIVATE_FD);
    if (complaints < 0 || dup2(STDIN_FILENO, STDOUT_FILENO) < 0 ||
        dup2(STDIN_FILENO, STDERR_FILENO) < 0)
        die("silence", "output");
}

static void become_runtime(char **argv)
{
    char **next = argv + FIRST_PROCS_FILE;
    int netns_fd = atoi(argv[NETNS_FD]);

    for (; strcmp(*next, "--") != 0; next++)
        join(*next);
    place_root(atoi(argv[ROOT_FD]), argv[TARGET], atoi(argv[COVER]));
    if (netns_fd >= 0 && setns(netns_fd, CLONE_NEWNET) != 0)
        die("join", "network namespace");
    silence();
    if (close_range(FIRST_PRIVATE_FD, ~0U, CLOSE_RANGE_CLOEXEC) != 0)
        die("close_range", "7..");
    execveat(atoi(argv[EXEC_FD]), "", next + 1, environ, AT_EMPTY_PATH);
    die("execute", next[1]);
}

static int has_command(int argc, char **argv)
{
    for (int i = FIRST_PROCS_FILE; i < argc - 1; i++)
        if (strcmp(argv[i], "--") == 0)
            return 1;
    return 0;
}

int main(int argc, char **argv)
{
    int status;

    if (!has_command(argc, argv)) {
        errno = EINVAL;
        die("read the", "arguments");
    }
    pid_t child = fork_into(argv[BOX]);
    if (child == 0)
        become_runtime(argv);
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            die("wait for", "the runtime");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
