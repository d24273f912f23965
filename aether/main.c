/* aether: PID 1 of a sandbox. Arguments, set-up, the loop. PROTOCOL.md says what it does. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "conn.h"
#include "exec.h"
#include "loop.h"
#include "privilege.h"
#include "reap.h"
#include "request.h"
#include "root.h"
#include "shutdown.h"

struct arguments {
    int listen_fd, cgroup_fd;
    uint64_t caps;
    bool no_new_privs;
    size_t pool_mib;
};

static void die(const char *what, int error) {
    const char *parts[] = {"aether: ", what, ": ", strerror(error), "\n"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (write(STDERR_FILENO, parts[i], strlen(parts[i])) < 0)
            break;
    _exit(70);
}

static uint64_t number(const char *text, int base, uint64_t max) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, base);
    if (errno || *end || !*text || *text == '-' || value > max)
        die(text, EINVAL);
    return value;
}

static struct arguments parse(int argc, char **argv) {
    static const struct option options[] = {
        {"listen-fd", required_argument, NULL, 'l'}, {"cgroup-fd", required_argument, NULL, 'c'},
        {"caps", required_argument, NULL, 'b'},      {"no-new-privs", no_argument, NULL, 'n'},
        {"pool-mib", required_argument, NULL, 'p'},  {0},
    };
    struct arguments args = {-1, -1, privilege_default_caps(), false, POOL_MIB};
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 'l':
            args.listen_fd = (int)number(optarg, 10, 1 << 20);
            break;
        case 'c':
            args.cgroup_fd = (int)number(optarg, 10, 1 << 20);
            break;
        case 'b':
            args.caps = number(optarg, 16, UINT64_MAX);
            break;
        case 'n':
            args.no_new_privs = true;
            break;
        case 'p':
            args.pool_mib = number(optarg, 10, 1024);
            break;
        default:
            die("usage", EINVAL);
        }
    }
    if (args.listen_fd < 0 || optind != argc || args.pool_mib == 0)
        die("usage: --listen-fd N [--cgroup-fd N] [--caps HEX] [--no-new-privs] [--pool-mib N]",
            EINVAL);
    return args;
}

/* Moves what we were given to 3 and 4 and closes the rest, our own binary's descriptor included. */
static void settle_descriptors(struct arguments *args) {
    int listen_fd = fcntl(args->listen_fd, F_DUPFD_CLOEXEC, 10);
    int cgroup_fd = args->cgroup_fd < 0 ? -1 : fcntl(args->cgroup_fd, F_DUPFD_CLOEXEC, 10);
    if (listen_fd < 0 || (args->cgroup_fd >= 0 && cgroup_fd < 0))
        die("descriptor", errno);
    args->listen_fd = dup3(listen_fd, 3, O_CLOEXEC);
    args->cgroup_fd = cgroup_fd < 0 ? -1 : dup3(cgroup_fd, 4, O_CLOEXEC);
    if (syscall(SYS_close_range, cgroup_fd < 0 ? 4 : 5, ~0U, 0) < 0)
        die("close_range", errno);
    /* 0, 1 and 2 have to be open, or a command's pipe would land there and dup2 onto itself. */
    int fd;
    while ((fd = open("/", O_PATH | O_CLOEXEC)) >= 0 && fd <= 2) {
    }
    close(fd);
    fcntl(args->listen_fd, F_SETFL, O_NONBLOCK);
}

static void check(const char *what, int error) {
    if (error < 0)
        die(what, -error);
}

static void set_up(struct arguments *args) {
    settle_descriptors(args);
    /* Absent in an image without the mount. */
    int proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    uint8_t boot_id[16];
    check("random numbers", getrandom(boot_id, sizeof boot_id, 0) == sizeof boot_id ? 0 : -EIO);
    request_init(boot_id);
    check("buffers", pool_init(args->pool_mib << 20) ? 0 : -ENOMEM);
    check("root", root_init());
    check("loop", loop_init());
    check("signals", reap_init());
    check("children", spawn_init(args->no_new_privs, proc_fd));
    tree_init(args->cgroup_fd, proc_fd);
    check("capabilities", privilege_init(args->caps));
    check("listening", conn_listen(args->listen_fd));
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* again: changing credentials may have reset it */
}

static uint64_t next_deadline(void) {
    if (reap_unfinished())
        return 0;
    uint64_t exec = exec_next_deadline(), shutdown = shutdown_next_deadline();
    return exec < shutdown ? exec : shutdown;
}

static _Noreturn void run(void) {
    for (;;) {
        loop_wait(next_deadline());
        reap();
        conn_input(now_ns() >= exec_next_deadline());
        exec_tick();
        shutdown_tick();
        do {
            conn_input(false);
            exec_pump();
            conn_flush();
        } while (conn_stalled() || (exec_pending() && conn_has_room()));
    }
}

int main(int argc, char **argv) {
    /* First of all: from here on nobody in the sandbox can trace us or look through our /proc
     * entry. */
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    prctl(PR_SET_NAME, "aether", 0, 0, 0);
    struct arguments args = parse(argc, argv);
    if (getpid() != 1)
        die("it signals every process of its pid namespace and must be PID 1 of one", EPERM);
    set_up(&args);
    run();
}
