#include "reap.h"

#include <errno.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "exec.h"
#include "loop.h"
#include "shutdown.h"

static struct source signals = {.fd = -1};
static bool due, childless = true;

/* A SIGTERM counts only from outside: in here anybody who is root could send one. */
static void ready(struct source *source, uint32_t events) {
    (void)events;
    struct signalfd_siginfo info;
    while (read(source->fd, &info, sizeof info) == sizeof info) {
        if (info.ssi_signo == SIGCHLD)
            due = true;
        else if (info.ssi_pid == 0)
            shutdown_begin(0, OUTER_TERM_GRACE);
    }
}

int reap_init(void) {
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGTERM);
    /* Everything else keeps its default, which for the init of a pid namespace means: ignored
     * unless sent from outside. */
    if (sigprocmask(SIG_BLOCK, &mask, NULL) < 0 || signal(SIGPIPE, SIG_IGN) == SIG_ERR)
        return -errno;
    signals =
        (struct source){.fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK), .ready = ready};
    return signals.fd < 0 ? -errno : loop_add(&signals, EPOLLIN);
}

void reap(void) {
    for (int i = 0; due && i < REAP_BATCH; i++) {
        int status;
        pid_t pid = wait4(-1, &status, WNOHANG | __WALL, NULL);
        if (pid <= 0) {
            childless = pid < 0 && errno == ECHILD;
            due = false;
            return;
        }
        exec_reaped(pid, status);
    }
}

bool reap_unfinished(void) { return due; }

bool reap_childless(void) {
    due = true;
    reap();
    return childless && !due;
}
