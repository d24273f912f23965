#include "root.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "limits.h"

static int root = -1;

int root_init(void) {
    root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    return root < 0 ? -errno : 0;
}

int root_fd(void) { return root; }

void root_adopt(int fd) { root = fd; }

int root_open(const char *path, int flags, mode_t mode) {
    struct open_how how = {
        .flags = (uint64_t)(flags | O_CLOEXEC),
        .mode = mode,
        .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS,
    };
    for (;;) {
        long fd = syscall(SYS_openat2, root, path, &how, sizeof how);
        if (fd >= 0)
            return (int)fd;
        /* EAGAIN: a rename raced with a ".." of the path; the kernel asks to look again. */
        if (errno != EAGAIN && errno != EINTR)
            return -errno;
    }
}

char *root_slurp(const char *path, int *error) {
    int fd = root_open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    *error = fd < 0 ? -fd : 0;
    if (fd < 0)
        return NULL;
    struct stat info;
    char *text = MAP_FAILED;
    if (fstat(fd, &info) < 0)
        *error = errno;
    else if (!S_ISREG(info.st_mode))
        *error = EINVAL;
    else if (info.st_size > PASSWD_MAX)
        *error = EFBIG;
    else if ((text = mmap(NULL, (size_t)info.st_size + 1, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) == MAP_FAILED)
        *error = ENOMEM;
    size_t len = 0;
    while (!*error && len < (size_t)info.st_size) {
        ssize_t got = read(fd, text + len, (size_t)info.st_size - len);
        if (got < 0)
            *error = errno;
        if (got <= 0)
            break;
        len += (size_t)got;
    }
    close(fd);
    return *error ? NULL : text;
}
