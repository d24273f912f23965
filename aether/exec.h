/* The records: every command and file operation that runs or whose result is kept.
 * exec.c: the table. life.c: from the start to the end. stream.c: what the edge sees of it. kept.c:
 * what remains. */
#ifndef AETHER_EXEC_H
#define AETHER_EXEC_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "input.h"
#include "limits.h"
#include "list.h"
#include "output.h"
#include "protocol.h"
#include "spawn.h"
#include "tree.h"

enum exec_state { EXEC_FREE, EXEC_RUNNING, EXEC_ENDED };

struct exec {
    struct list link;  /* in `exec_watched`, one of the lists of kept.c, or the free list */
    struct list ready; /* in the queue of those with something to send */
    enum exec_state state;
    bool is_file;
    uint32_t id_len;
    char id[MAX_EXEC_ID + 1];
    uint64_t digest;

    uint32_t stream; /* where the edge listens; 0: nobody does */
    bool watch;      /* it wants no output, only the end */
    uint32_t credit; /* output bytes that stream still takes */
    int turn;        /* which output goes first */

    pid_t pid;  /* 0 once reaped; the tree remembers it */
    int status; /* of wait4 */
    struct tree tree;
    struct output out[2];
    struct input in;

    bool read; /* an edge has had its output and EXIT */
    bool timed_out, killed, survivors;
    bool killing; /* SIGKILL was sent to the tree, which is not gone yet */
    uint32_t kill_streams[KILL_WAITERS];

    uint64_t started_ns, ended_ns; /* ended: the leader was reaped */
    uint64_t deadline_ns;          /* UINT64_MAX: none */
    uint64_t idle_ns, drain_ns;    /* when to let go of pipes that others hold */
    uint64_t kill_ns;              /* when to stop waiting for a killed tree */
    uint64_t listed_ns;            /* since when it is in its list of kept.c */
};

struct exec_options {
    struct str id;
    uint64_t digest, capture;
    uint32_t stream, credit, timeout_ms;
    bool stdin_pipe, watch;
};

/* --- exec.c --- */
extern struct list exec_watched; /* running, or being killed: those with deadlines */

int exec_slot(const struct exec *exec);
struct exec *exec_by_id(const struct str *id);
struct exec *exec_by_stream(uint32_t stream);
struct exec *exec_by_pid(pid_t pid);
void exec_index_stream(struct exec *exec, uint32_t stream); /* 0: none any more */
void exec_unindex_pid(struct exec *exec);

struct exec *exec_start(const struct exec_options *options, const struct job *job,
                        int *error);  /* NULL: nothing ran */
void exec_ended(struct exec *exec);   /* from now on it is kept */
void exec_release(struct exec *exec); /* forgets it */
void exec_rest(void); /* gives memory back if nothing is left; not while events are handled */
void exec_detach_all(void);
void exec_list(void); /* appends *processes* to the frame under construction */

/* --- life.c --- */
void exec_started(struct exec *exec, uint32_t timeout_ms);
void exec_reaped(pid_t pid, int status);
void exec_check(struct exec *exec); /* something it was waiting for may have come */
void exec_kill(struct exec *exec, uint32_t stream, int signal, bool tree);
void exec_kill_tree(struct exec *exec);
void exec_abandon(struct exec *exec); /* a file operation */
uint64_t exec_next_deadline(void);
void exec_tick(void);
void exec_shift_deadlines(uint64_t ns);

/* --- stream.c --- */
void exec_attach(struct exec *exec, uint32_t stream, uint32_t credit, bool watch);
void exec_seek(struct exec *exec, uint64_t stdout_at, uint64_t stderr_at);
void exec_send_started(struct exec *exec, bool known);
void exec_detach(struct exec *exec);
void exec_add_credit(struct exec *exec, uint32_t bytes);
bool exec_has_reader(const struct exec *exec);
void exec_wake(struct exec *exec); /* it may have something to send */
bool exec_pending(void);
void exec_pump(void); /* sends while the connection has room */

#endif
