/* What root inside a sandbox might try on PID 1. Prints one line per attempt. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static void tell(const char *what, int done) {
    const char *how = done ? "POSSIBLE" : errno == EPERM || errno == EACCES ? "denied" : "absent";
    printf("%s: %s\n", what, how);
}

int main(void) {
    static const char *paths[] = {"/proc/1/mem", "/proc/1/maps", "/proc/1/environ", "/proc/1/exe",
                                  "/proc/1/cwd", "/proc/1/fd/3", "/proc/1/fd/4"};
    char buffer[8], what[64];
    struct iovec mine = {buffer, sizeof buffer}, theirs = {(void *)0x400000, sizeof buffer};
    struct rlimit one = {1, 1};
    int pidfd = (int)syscall(SYS_pidfd_open, 1, 0);

    tell("ptrace", ptrace(PTRACE_SEIZE, 1, 0, 0) == 0);
    tell("process_vm_readv", process_vm_readv(1, &mine, 1, &theirs, 1, 0) > 0);
    tell("pidfd_getfd", syscall(SYS_pidfd_getfd, pidfd, 3, 0) >= 0);
    tell("prlimit", prlimit(1, RLIMIT_CPU, &one, NULL) == 0);
    tell("setns", setns(pidfd, CLONE_NEWPID) == 0);
    for (unsigned i = 0; i < sizeof paths / sizeof *paths; i++) {
        snprintf(what, sizeof what, "open %s", paths[i]);
        int fd = open(paths[i], O_RDONLY);
        /* Some of them open and refuse to be read. */
        tell(what, fd >= 0 && read(fd, buffer, sizeof buffer) > 0);
    }
    tell("ioctl on own cgroup", open("/sys/fs/cgroup/cgroup.procs", O_RDWR) >= 0);
    return 0;
}
