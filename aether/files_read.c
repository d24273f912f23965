/* READ, LIST and STAT. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/sendfile.h>
#include <unistd.h>

#include "files.h"
#include "protocol.h"
#include "root.h"

static int write_all(const void *data, size_t len) {
    for (const char *at = data; len > 0;) {
        ssize_t sent = write(STDOUT_FILENO, at, len);
        if (sent < 0 && errno != EINTR)
            return errno;
        if (sent > 0) {
            at += sent;
            len -= (size_t)sent;
        }
    }
    return 0;
}

/* Files that cannot be spliced into a pipe, as those of /proc. */
static int copy_slowly(int fd, uint64_t offset, uint64_t left) {
    static char buffer[64 * 1024];
    while (left > 0) {
        ssize_t got = pread(fd, buffer, left < sizeof buffer ? left : sizeof buffer, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? errno : 0;
        int error = write_all(buffer, (size_t)got);
        if (error)
            return error;
        offset += (uint64_t)got;
        left -= (uint64_t)got;
    }
    return 0;
}

static int copy(int fd, uint64_t offset, uint64_t left) {
    off_t at = (off_t)offset;
    while (left > 0) {
        ssize_t sent =
            sendfile(STDOUT_FILENO, fd, &at, left < (1 << 20) ? (size_t)left : (1 << 20));
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno == EINVAL)
            return copy_slowly(fd, (uint64_t)at, left);
        if (sent <= 0)
            return sent < 0 ? errno : 0;
        left -= (uint64_t)sent;
    }
    return 0;
}

int files_read(const struct file_request *request, uint64_t *value) {
    /* Non-blocking, for what turns out to be a FIFO: it is refused, not waited for. */
    int fd = root_open(request->path.text, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    struct stat info;
    if (fd < 0)
        return -fd;
    if (fstat(fd, &info) < 0)
        return errno;
    if (!S_ISREG(info.st_mode))
        return S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
    if (request->offset > INT64_MAX)
        return EINVAL;
    *value = (uint64_t)info.st_size;
    return copy(fd, request->offset, request->size);
}

/* --- entries --- */

static struct {
    char bytes[64 * 1024];
    size_t len;
} batch;

static void put(const void *data, size_t len) {
    memcpy(batch.bytes + batch.len, data, len);
    batch.len += len;
}

static void put_str(const char *text, size_t len) {
    uint32_t wire_len = (uint32_t)len;
    put(&wire_len, sizeof wire_len);
    put(text, len);
    put("", 1);
}

static int flush_batch(void) {
    int error = write_all(batch.bytes, batch.len);
    batch.len = 0;
    return error;
}

static int put_entry(const struct stat *info, const char *name, const char *target,
                     size_t target_len) {
    size_t largest = 64 + NAME_MAX + PATH_MAX;
    int error = batch.len + largest > sizeof batch.bytes ? flush_batch() : 0;
    if (error)
        return error;
    uint32_t numbers[3] = {info->st_mode, info->st_uid, info->st_gid};
    uint64_t size = (uint64_t)info->st_size;
    int64_t mtime_ns = (int64_t)info->st_mtim.tv_sec * 1000000000 + info->st_mtim.tv_nsec;
    put(numbers, sizeof numbers);
    put(&size, sizeof size);
    put(&mtime_ns, sizeof mtime_ns);
    put_str(name, strlen(name));
    put_str(target, target_len);
    return 0;
}

/* `link` as readlinkat takes it: a name below dir, or "" for a descriptor of the link itself. */
static int describe(const struct stat *info, const char *name, int dir, const char *link) {
    char target[PATH_MAX];
    ssize_t len = S_ISLNK(info->st_mode) ? readlinkat(dir, link, target, sizeof target) : 0;
    return put_entry(info, name, target, len > 0 ? (size_t)len : 0);
}

int files_list(const struct file_request *request, uint64_t *value) {
    int fd = root_open(request->path.text, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0)
        return -fd;
    DIR *dir = fdopendir(fd);
    if (!dir)
        return errno;
    const struct dirent *entry;
    int error = 0;
    while (!error && (entry = readdir(dir))) {
        struct stat info;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (request->size && *value >= request->size)
            ++*value;
        else if (fstatat(fd, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) ==
                 0) { /* else it has just gone */
            ++*value;
            error = describe(&info, entry->d_name, fd, entry->d_name);
        }
    }
    return error ? error : flush_batch();
}

int files_stat(const struct file_request *request) {
    int follow = request->flags & FILE_FOLLOW ? 0 : O_NOFOLLOW;
    int fd = root_open(request->path.text, O_PATH | follow, 0);
    struct stat info;
    if (fd < 0)
        return -fd;
    if (fstat(fd, &info) < 0)
        return errno;
    const char *name = strrchr(request->path.text, '/');
    name = name ? name + 1 : request->path.text;
    int error = strlen(name) > NAME_MAX ? ENAMETOOLONG : describe(&info, name, fd, "");
    return error ? error : flush_batch();
}
