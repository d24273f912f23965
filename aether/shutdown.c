#include "shutdown.h"

#include <signal.h>
#include <unistd.h>

#include "conn.h"
#include "exec.h"
#include "limits.h"
#include "loop.h"
#include "reap.h"

static bool begun, killed;
static uint32_t asked_by;
static uint64_t next = UINT64_MAX; /* KILL, then giving up on what survives it */

bool shutdown_begun(void) { return begun; }

uint64_t shutdown_next_deadline(void) { return next; }

void shutdown_begin(uint32_t stream, uint64_t grace_ns) {
    if (stream)
        asked_by = stream;
    if (!begun)
        kill(-1, SIGTERM);
    begun = true;
    uint64_t at = now_ns() + grace_ns;
    if (!killed && at < next)
        next = at;
}

void shutdown_tick(void) {
    if (!begun)
        return;
    if (!killed && now_ns() >= next) {
        kill(-1, SIGKILL); /* all but ourselves, in one sweep of the kernel: no fork escapes it */
        killed = true;
        next = now_ns() + KILL_WAIT;
    }
    if (!reap_childless() && !(killed && now_ns() >= next))
        return;
    exec_pump();
    if (asked_by)
        reply_done(asked_by, 0);
    conn_drain(now_ns() + SECOND);
    _exit(0);
}
