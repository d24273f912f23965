#include "loop.h"

#include <errno.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#include "limits.h"

static int epoll_fd = -1;

int loop_init(void) {
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return epoll_fd < 0 ? -errno : 0;
}

int loop_add(struct source *source, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = source};
    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, source->fd, &event) < 0 ? -errno : 0;
}

void loop_modify(struct source *source, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = source};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, source->fd, &event);
}

void loop_remove(struct source *source) { epoll_ctl(epoll_fd, EPOLL_CTL_DEL, source->fd, NULL); }

void loop_close(struct source *source) {
    if (source->fd < 0)
        return;
    /* Explicitly: a forked child that has not yet closed its copy would keep the descriptor in the
     * epoll set. */
    loop_remove(source);
    close(source->fd);
    source->fd = -1;
}

void loop_wait(uint64_t until_ns) {
    int timeout_ms = -1;
    if (until_ns != UINT64_MAX) {
        uint64_t now = now_ns();
        uint64_t wait_ms = until_ns > now ? (until_ns - now + MS - 1) / MS : 0;
        timeout_ms = wait_ms > 3600 * 1000 ? 3600 * 1000 : (int)wait_ms;
    }
    struct epoll_event events[64];
    int count = epoll_wait(epoll_fd, events, 64, timeout_ms);
    for (int i = 0; i < count; i++) {
        struct source *source = events[i].data.ptr;
        if (source->fd >= 0)
            source->ready(source, events[i].events);
    }
}

uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * SECOND + (uint64_t)time.tv_nsec;
}
