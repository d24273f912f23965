#include "conn.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "exec.h"
#include "limits.h"
#include "loop.h"
#include "request.h"

#define IN_SIZE (MAX_PAYLOAD + HEADER_BYTES)
#define KEEP_PAGES (128 * 1024) /* of a buffer that was larger for a moment */
#define RECEIVE (64 * 1024)

static struct source listener = {.fd = -1};
static struct source peer = {.fd = -1};

/* in: bytes [in_start, in_end) are unparsed. out: bytes [out_start, out_end) are unsent. */
static uint8_t *in, *out;
static size_t in_start, in_end, in_peak;
static size_t out_start, out_end_at, out_peak, frame_at;
static bool out_failed;
static bool readable; /* the socket may have more */
static bool stalled;  /* a whole frame waits in `in` for room in `out` */
static uint32_t watched;

bool conn_open(void) { return peer.fd >= 0; }

/* Gives back the pages of an emptied buffer beyond what a quiet agent needs. */
static void trim(uint8_t *buffer, size_t size, size_t *peak) {
    if (*peak > KEEP_PAGES)
        madvise(buffer + KEEP_PAGES, size - KEEP_PAGES, MADV_DONTNEED);
    *peak = 0;
}

void conn_rest(void) {
    if (in_end == 0)
        madvise(in, IN_SIZE, MADV_DONTNEED);
    if (out_end_at == 0)
        madvise(out, OUT_SIZE, MADV_DONTNEED);
}

static void disconnect(void) {
    if (peer.fd < 0)
        return;
    loop_close(&peer);
    in_start = in_end = out_start = out_end_at = 0;
    trim(in, IN_SIZE, &in_peak);
    trim(out, OUT_SIZE, &out_peak);
    out_failed = readable = stalled = false;
    exec_detach_all();
}

/* --- frames out --- */

void out_begin(enum frame_type type, uint32_t stream) {
    frame_at = out_end_at;
    out_u32(0);
    out_u8((uint8_t)type);
    out_u32(stream);
}

void *out_reserve(size_t len) {
    if (peer.fd < 0 || OUT_SIZE - out_end_at < len) {
        out_failed = peer.fd >= 0;
        return NULL;
    }
    void *at = out + out_end_at;
    out_end_at += len;
    return at;
}

void out_bytes(const void *data, size_t len) {
    void *at = out_reserve(len);
    if (at && len > 0)
        memcpy(at, data, len);
}

/* Both ends are little-endian machines: every architecture the agent is built for. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");
void out_u8(uint8_t value) { out_bytes(&value, sizeof value); }
void out_u16(uint16_t value) { out_bytes(&value, sizeof value); }
void out_u32(uint32_t value) { out_bytes(&value, sizeof value); }
void out_u64(uint64_t value) { out_bytes(&value, sizeof value); }

void out_str(const char *text, size_t len) {
    out_u32((uint32_t)len);
    out_bytes(text, len);
    out_u8(0);
}

void out_end(void) {
    if (peer.fd < 0 || out_failed)
        return;
    uint32_t payload = (uint32_t)(out_end_at - frame_at - HEADER_BYTES);
    memcpy(out + frame_at, &payload, sizeof payload);
    if (out_end_at > out_peak)
        out_peak = out_end_at;
}

bool conn_has_room(void) { return peer.fd >= 0 && out_end_at - out_start < OUT_LOW; }

void conn_flush(void) {
    while (peer.fd >= 0 && !out_failed && out_start < out_end_at) {
        ssize_t sent =
            send(peer.fd, out + out_start, out_end_at - out_start, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno != EAGAIN)
            out_failed = true;
        if (sent < 0)
            break;
        out_start += (size_t)sent;
    }
    if (out_failed) {
        disconnect();
    } else if (out_start == out_end_at) {
        out_start = out_end_at = 0;
        trim(out, OUT_SIZE, &out_peak);
    } else if (out_start > OUT_LOW) {
        memmove(out, out + out_start, out_end_at - out_start);
        out_end_at -= out_start;
        out_start = 0;
    }
    if (peer.fd < 0)
        return;
    /* While the edge does not read its answers we take no more requests from it. */
    uint32_t wanted = (conn_has_room() ? EPOLLIN : 0) | (out_start < out_end_at ? EPOLLOUT : 0);
    if (wanted != watched)
        loop_modify(&peer, wanted);
    watched = wanted;
}

void conn_drain(uint64_t until_ns) {
    conn_flush();
    while (peer.fd >= 0 && out_end_at > out_start && now_ns() < until_ns) {
        struct pollfd wait = {.fd = peer.fd, .events = POLLOUT};
        poll(&wait, 1, 10);
        conn_flush();
    }
}

void reply_error(uint32_t stream, enum error_code code, int error, const char *message) {
    out_begin(FRAME_ERROR, stream);
    out_u16((uint16_t)code);
    out_u32((uint32_t)error);
    out_str(message, strlen(message));
    out_end();
}

void reply_done(uint32_t stream, int error) {
    out_begin(FRAME_DONE, stream);
    out_u32((uint32_t)error);
    out_end();
}

/* --- frames in --- */

static void malformed(const char *message) {
    reply_error(0, ERROR_MALFORMED, EBADMSG, message);
    conn_flush();
    disconnect();
}

/* Handles every complete frame for whose answer there is room. */
static void parse(void) {
    stalled = false;
    while (in_end - in_start >= HEADER_BYTES) {
        const uint8_t *header = in + in_start;
        uint32_t payload, stream;
        memcpy(&payload, header, sizeof payload);
        memcpy(&stream, header + 5, sizeof stream);
        if (payload > MAX_PAYLOAD) {
            malformed("frame too long");
            return;
        }
        if (in_end - in_start < HEADER_BYTES + (size_t)payload)
            break;
        if (!conn_has_room()) {
            stalled = true;
            return;
        }
        const char *wrong = request_handle(header[4], stream, header + HEADER_BYTES, payload);
        if (wrong) {
            malformed(wrong);
            return;
        }
        in_start += HEADER_BYTES + payload;
    }
    memmove(in, in + in_start, in_end - in_start);
    in_end -= in_start;
    in_start = 0;
    if (in_end == 0)
        trim(in, IN_SIZE, &in_peak);
}

bool conn_stalled(void) { return stalled && conn_has_room(); }

void conn_input(bool force) {
    if (stalled)
        parse();
    readable |= force;
    while (readable && !stalled && conn_has_room()) {
        size_t space = IN_SIZE - in_end;
        ssize_t got = recv(peer.fd, in + in_end, space < RECEIVE ? space : RECEIVE, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR)
            continue;
        readable = got > 0;
        if (got < 0 && errno == EAGAIN)
            return;
        if (got <= 0) {
            disconnect();
            return;
        }
        in_end += (size_t)got;
        if (in_end > in_peak)
            in_peak = in_end;
        parse();
    }
}

/* The round of the main loop does the work; a hang-up is found by the read or the write it leads
 * to. */
static void peer_ready(struct source *source, uint32_t events) {
    (void)source;
    readable |= (events & ~(uint32_t)EPOLLOUT) != 0;
}

/* --- accepting --- */

/* The edge is root outside this pid namespace, where our view of its pid is 0. A process in here
 * never shows as 0. */
static bool peer_is_edge(int fd) {
    struct ucred cred;
    socklen_t len = sizeof cred;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0 && cred.uid == 0 &&
           cred.pid == 0;
}

static void listener_ready(struct source *source, uint32_t events) {
    (void)events;
    int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    if (!peer_is_edge(fd)) {
        close(fd);
        return;
    }
    if (peer.fd >= 0) {
        reply_error(0, ERROR_SUPERSEDED, 0, "a newer connection took over");
        conn_flush();
        disconnect();
    }
    peer.fd = fd;
    peer.ready = peer_ready;
    watched = EPOLLIN;
    if (loop_add(&peer, watched) < 0) {
        disconnect();
        return;
    }
    request_hello();
}

int conn_listen(int fd) {
    in = mmap(NULL, IN_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
              -1, 0);
    out = mmap(NULL, OUT_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
               -1, 0);
    if (in == MAP_FAILED || out == MAP_FAILED)
        return -ENOMEM;
    madvise(out, OUT_SIZE, MADV_DONTFORK); /* `in` is where a child finds its arguments */
    listener = (struct source){.fd = fd, .ready = listener_ready};
    return loop_add(&listener, EPOLLIN);
}
