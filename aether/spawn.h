/* Starting the child of a command or file operation, and what that child reports if it could not
 * begin. */
#ifndef AETHER_SPAWN_H
#define AETHER_SPAWN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "tree.h"
#include "wire.h"

struct command {
    struct str cwd, user;
    uint32_t flags;
    uint32_t argc, envc;
    struct wire args, envs; /* argc and envc strings, checked */
};

struct file_request {
    uint8_t op;
    uint32_t flags, mode;
    uint64_t offset, size;
    struct str user, path, path2;
};

struct job {
    bool is_file;
    union {
        struct command command;
        struct file_request file;
    };
};

/* Shared memory, one per slot: it survives the child and costs neither descriptor nor read. */
struct report {
    uint32_t stage; /* 0: nothing went wrong */
    int32_t error;
    uint64_t value;
};

int spawn_init(bool no_new_privs, int proc_fd);
struct report *spawn_report(int slot);

/* stdio[i] < 0: /dev/null. Returns the pid or -errno. */
pid_t spawn(const struct job *job, struct tree *tree, const int stdio[3], struct report *report);

#endif
