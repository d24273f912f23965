/*
 * Stand-in for the agent: takes connections on descriptor 3, runs what it is sent with /bin/sh and
 * sends back what that printed. It has no protocol, so a test of the kernel layer needs no client.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

static void serve(int peer)
{
    char script[65536];
    size_t length = 0;
    ssize_t got;

    while ((got = read(peer, script + length, sizeof script - 1 - length)) > 0)
        length += (size_t)got;
    script[length] = 0;
    dup2(peer, 1);
    dup2(peer, 2);
    close_range(3, ~0U, 0);
    execl("/bin/sh", "sh", "-c", script, (char *)NULL);
    _exit(127);
}

int main(void)
{
    prctl(PR_SET_DUMPABLE, 0);
    signal(SIGCHLD, SIG_IGN);
    for (;;) {
        int peer = accept4(3, NULL, NULL, SOCK_CLOEXEC);
        if (peer >= 0 && fork() == 0)
            serve(peer);
        close(peer);
    }
}
