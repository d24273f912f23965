#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "files.h"
#include "limits.h"
#include "privilege.h"
#include "protocol.h"
#include "root.h"

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

static struct report *reports;
static bool always_no_new_privs;
static int null_fd = -1;
static int proc_fd = -1;
static bool protected_from_oom;
static struct rlimit inherited_files;

/* /dev/null as it is before anything untrusted runs; an image without one gets a pipe at its end,
 * which reads the same. */
static int open_null(void) {
    struct stat info;
    int fd = open("/dev/null", O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK);
    if (fd >= 0 && fstat(fd, &info) == 0 && S_ISCHR(info.st_mode) && info.st_rdev == makedev(1, 3))
        return fd;
    if (fd >= 0)
        close(fd);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return -errno;
    close(ends[1]);
    return ends[0];
}

static bool own_oom_score_is_negative(void) {
    char text[16] = "";
    int fd = proc_fd >= 0 ? openat(proc_fd, "self/oom_score_adj", O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return false;
    bool negative = read(fd, text, sizeof text - 1) > 0 && text[0] == '-';
    close(fd);
    return negative;
}

int spawn_init(bool no_new_privs, int proc) {
    always_no_new_privs = no_new_privs;
    proc_fd = proc;
    protected_from_oom = own_oom_score_is_negative();
    reports = mmap(NULL, SLOTS * sizeof *reports, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    null_fd = open_null();
    if (reports == MAP_FAILED || null_fd < 0)
        return -ENOMEM;
    /* The agent needs descriptors for a thousand commands; a command gets what the runtime gave. */
    if (getrlimit(RLIMIT_NOFILE, &inherited_files) < 0)
        return -errno;
    struct rlimit raised = {inherited_files.rlim_max, inherited_files.rlim_max};
    return setrlimit(RLIMIT_NOFILE, &raised) < 0 ? -errno : 0;
}

struct report *spawn_report(int slot) { return &reports[slot]; }

/* --- below here: in the child, which may block and may use memory --- */

static void fail(struct report *report, enum stage stage, int error) {
    report->error = error;
    report->stage = stage;
    _exit(126);
}

static void default_signals(void) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL); /* the only one the agent ignores */
    /* A spawner's libc may leave the signals of its own threads ignored, and ours hides them from
     * signal(); the kernel's structure of zeros is the default action. */
    const uint64_t by_default[4] = {0};
    for (long number = 32; number <= 34; number++)
        syscall(SYS_rt_sigaction, number, by_default, NULL, sizeof(uint64_t));
}

static void take_stdio(const int stdio[3]) {
    for (int i = 0; i < 3; i++)
        dup2(stdio[i] >= 0 ? stdio[i] : null_fd, i);
}

/* The agent's protection from the OOM killer is not for its children. */
static void drop_oom_protection(void) {
    int fd = protected_from_oom ? openat(proc_fd, "self/oom_score_adj", O_WRONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    ssize_t ignored = write(fd, "0", 1);
    (void)ignored;
    close(fd);
}

static char **string_array(uint32_t count, struct wire strings, size_t extra) {
    char **array = calloc(count + extra + 1, sizeof *array);
    for (uint32_t i = 0; array && i < count; i++)
        array[i] = (char *)wire_str(&strings).text;
    return array;
}

static const char *environment(char **env, const char *name) {
    size_t len = strlen(name);
    for (; *env; env++)
        if (strncmp(*env, name, len) == 0 && (*env)[len] == '=')
            return *env + len + 1;
    return NULL;
}

/* As execvpe(3), but an unknown format is an error: nothing here relies on a shell. Returns the
 * errno. */
static int execute(char **argv, char **env) {
    const char *name = argv[0];
    if (strchr(name, '/') || !*name) {
        execve(name, argv, env);
        return errno;
    }
    const char *path = environment(env, "PATH");
    bool denied = false;
    for (const char *part = path ? path : DEFAULT_PATH; part; part = strchr(part, ':')) {
        part += *part == ':';
        size_t len = strcspn(part, ":");
        char candidate[PATH_MAX];
        if (snprintf(candidate, sizeof candidate, "%.*s%s%s", (int)len, part, len ? "/" : "",
                     name) >= (int)sizeof candidate)
            continue;
        execve(candidate, argv, env);
        if (errno == EACCES)
            denied = true;
        else if (errno != ENOENT && errno != ENOTDIR)
            return errno;
    }
    return denied ? EACCES : ENOENT;
}

static void run_command(const struct command *command, struct report *report) {
    struct identity identity;
    int error = user_resolve(command->user.text, &identity);
    if (error)
        fail(report, STAGE_USER, error);
    char **argv = string_array(command->argc, command->args, 0);
    char **env = string_array(command->envc, command->envs, 1);
    if (!argv || !env)
        fail(report, STAGE_EXEC, ENOMEM);
    char home[PATH_MAX] = "HOME=/";
    if (!environment(env, "HOME")) {
        if (identity.home && *identity.home)
            snprintf(home, sizeof home, "HOME=%s", identity.home);
        env[command->envc] = home;
    }
    if (setrlimit(RLIMIT_NOFILE, &inherited_files) < 0)
        fail(report, STAGE_PRIVILEGES, errno);
    error = privilege_become(&identity, false);
    if (!error && (always_no_new_privs || command->flags & EXEC_NO_NEW_PRIVS) &&
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        error = errno;
    if (error)
        fail(report, STAGE_PRIVILEGES, error);
    if (chdir(command->cwd.len ? command->cwd.text : "/") < 0)
        fail(report, STAGE_CWD, errno);
    fail(report, STAGE_EXEC, execute(argv, env));
}

/* Without an exec nothing closes by itself, and a copy of another command's stdin would keep that
 * command waiting. */
static void close_all_but_root(void) {
    dup2(root_fd(), 3);
    root_adopt(3);
    syscall(SYS_close_range, 4, ~0U, 0);
}

static void run_file(const struct file_request *request, struct report *report) {
    struct identity identity;
    int error = user_resolve(request->user.text, &identity);
    if (error)
        fail(report, STAGE_USER, error);
    close_all_but_root();
    error = privilege_become(&identity, true);
    if (error)
        fail(report, STAGE_PRIVILEGES, error);
    error = files_run(request, &report->value);
    if (error)
        fail(report, STAGE_FILE, error);
    _exit(0);
}

static void child(const struct job *job, const struct tree *tree, const int stdio[3],
                  struct report *report) {
    int error = tree_join(tree);
    if (error)
        fail(report, STAGE_CGROUP, -error);
    setsid();
    default_signals();
    take_stdio(stdio);
    drop_oom_protection();
    umask(022);
    if (job->is_file)
        run_file(&job->file, report);
    else
        run_command(&job->command, report);
}

pid_t spawn(const struct job *job, struct tree *tree, const int stdio[3], struct report *report) {
    *report = (struct report){0};
    pid_t pid = tree_fork(tree);
    if (pid == 0) {
        child(job, tree, stdio, report);
        _exit(126);
    }
    return pid < 0 ? -errno : pid;
}
