/* WRITE, REMOVE, RENAME and MKDIR. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "files.h"
#include "limits.h"
#include "protocol.h"
#include "root.h"

enum { MAX_LINKS = 40, DEFAULT_FILE = 0644, DEFAULT_DIRECTORY = 0755, REMOVE_PASSES = 16 };

/* --- WRITE --- */

/* Where the bytes belong: a final link is followed, as a path in our root. Descriptor of the
 * directory or -errno. */
static int find_target(const char *path, char *name, struct stat *info, bool *exists) {
    char here[2 * PATH_MAX], link[PATH_MAX];
    if (strlen(path) >= PATH_MAX)
        return -ENAMETOOLONG;
    strcpy(here, path);
    for (int links = 0; links <= MAX_LINKS; links++) {
        int parent = files_parent(here, name);
        if (parent < 0)
            return parent == -EBUSY ? -EISDIR : parent;
        *exists = fstatat(parent, name, info, AT_SYMLINK_NOFOLLOW) == 0;
        if (!*exists && errno != ENOENT)
            return -errno;
        if (!*exists && here[strlen(here) - 1] == '/')
            return -EISDIR;
        if (!*exists || !S_ISLNK(info->st_mode))
            return parent;
        ssize_t len = readlinkat(parent, name, link, sizeof link - 1);
        close(parent);
        if (len < 0)
            return -errno;
        link[len] = 0;
        char *last = strrchr(here, '/');
        size_t keep = *link == '/' || !last ? 0 : (size_t)(last - here) + 1;
        if (keep + (size_t)len >= PATH_MAX)
            return -ENAMETOOLONG;
        strcpy(here + keep, link);
    }
    return -ELOOP;
}

/* Exactly `size` bytes: an end before them is the edge giving up, not the end of the file. */
static int receive(int fd, uint64_t size) {
    static char buffer[64 * 1024];
    while (size > 0) {
        ssize_t got =
            read(STDIN_FILENO, buffer, size < sizeof buffer ? (size_t)size : sizeof buffer);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? errno : ECANCELED;
        size -= (uint64_t)got;
        for (char *at = buffer; got > 0;) {
            ssize_t put = write(fd, at, (size_t)got);
            if (put < 0 && errno != EINTR)
                return errno;
            at += put > 0 ? put : 0;
            got -= put > 0 ? put : 0;
        }
    }
    return 0;
}

static int fill(int fd, const struct file_request *request, const struct stat *old) {
    mode_t mode = DEFAULT_FILE;
    if (request->mode != MODE_KEEP)
        mode = request->mode & 07777;
    else if (old)
        mode = old->st_mode & 07777;
    int error = receive(fd, request->size);
    /* Only root can give a file away; another user's replacement becomes that user's, as with any
     * editor. */
    if (!error && old && (old->st_uid != geteuid() || old->st_gid != getegid()) &&
        fchown(fd, old->st_uid, old->st_gid) < 0 && errno != EPERM)
        error = errno;
    return error ? error : fchmod(fd, mode) < 0 ? errno : 0;
}

int files_write(const struct file_request *request) {
    char name[NAME_MAX + 1], temporary[40];
    struct stat old;
    bool exists;
    int parent = find_target(request->path.text, name, &old, &exists);
    if (parent < 0)
        return -parent;
    if (exists && !S_ISREG(old.st_mode))
        return S_ISDIR(old.st_mode) ? EISDIR : EINVAL;
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        return EIO;
    snprintf(temporary, sizeof temporary, ".aether-%016llx", (unsigned long long)random);
    int fd = openat(parent, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno;
    int error = fill(fd, request, exists ? &old : NULL);
    if (close(fd) < 0 && !error)
        error = errno;
    if (!error && renameat(parent, temporary, parent, name) < 0)
        error = errno;
    if (error)
        unlinkat(parent, temporary, 0);
    return error;
}

/* --- REMOVE --- */

static int remove_entry(int dir, const char *name, int depth);

/* Removes what is in the directory; returns the first error but goes on after it. */
static int empty_directory(int fd, int depth, bool *found) {
    DIR *dir = fdopendir(fd);
    if (!dir) {
        int error = errno;
        close(fd);
        return error;
    }
    int first = 0;
    const struct dirent *entry;
    *found = false;
    while ((entry = readdir(dir))) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        *found = true;
        int error = remove_entry(fd, entry->d_name, depth + 1);
        if (!first && error != ENOENT)
            first = error;
    }
    closedir(dir);
    return first;
}

/* Each level holds its parent open and never says "..", so a directory moved meanwhile leads
 * nowhere else. */
static int remove_entry(int dir, const char *name, int depth) {
    if (unlinkat(dir, name, 0) == 0)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return errno;
    int error = errno;
    if (depth >= MAX_DEPTH)
        return ELOOP;
    for (int pass = 0; pass < REMOVE_PASSES; pass++) {
        bool found;
        int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0)
            return errno == ENOTDIR || errno == ELOOP ? error : errno;
        error = empty_directory(fd, depth, &found);
        if (error)
            return error;
        if (unlinkat(dir, name, AT_REMOVEDIR) == 0)
            return 0;
        error = errno;
        /* Entries added meanwhile, or passed over because the directory shrank as it was read: look
         * again. */
        if (error != ENOTEMPTY && error != EEXIST)
            return error;
    }
    return error;
}

int files_remove(const struct file_request *request) {
    char name[NAME_MAX + 1];
    struct stat info;
    int parent = files_parent(request->path.text, name);
    if (parent < 0)
        return -parent;
    if (fstatat(parent, name, &info, AT_SYMLINK_NOFOLLOW) < 0)
        return errno;
    if (request->flags & FILE_RECURSIVE)
        return remove_entry(parent, name, 0);
    return unlinkat(parent, name, S_ISDIR(info.st_mode) ? AT_REMOVEDIR : 0) < 0 ? errno : 0;
}

/* --- RENAME and MKDIR --- */

int files_rename(const struct file_request *request) {
    char from[NAME_MAX + 1], to[NAME_MAX + 1];
    int from_dir = files_parent(request->path.text, from);
    int to_dir = from_dir < 0 ? from_dir : files_parent(request->path2.text, to);
    if (to_dir < 0)
        return -to_dir;
    return renameat(from_dir, from, to_dir, to) < 0 ? errno : 0;
}

static int make_one(const char *path, mode_t mode) {
    char name[NAME_MAX + 1];
    int parent = files_parent(path, name);
    if (parent < 0)
        return -parent;
    int error = mkdirat(parent, name, mode) < 0 ? errno : 0;
    close(parent);
    return error;
}

static bool is_directory(const char *path) {
    int fd = root_open(path, O_PATH | O_DIRECTORY, 0);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

/* Like mkdir -p: `path` and, as far as they are missing, the directories above it. */
static int make_all(const char *path, mode_t mode) {
    char prefix[PATH_MAX];
    if (strlen(path) >= sizeof prefix)
        return ENAMETOOLONG;
    if (is_directory(path))
        return 0;
    for (size_t at = 1; path[at]; at++) {
        if (path[at] != '/' || path[at - 1] == '/')
            continue;
        memcpy(prefix, path, at);
        prefix[at] = 0;
        int error = is_directory(prefix) ? 0 : make_one(prefix, DEFAULT_DIRECTORY);
        if (error && error != EEXIST)
            return error;
    }
    int error = make_one(path, mode);
    return error == EEXIST && is_directory(path) ? 0 : error;
}

int files_mkdir(const struct file_request *request) {
    mode_t mode = request->mode == MODE_KEEP ? DEFAULT_DIRECTORY : request->mode & 07777;
    if (request->flags & FILE_RECURSIVE)
        return make_all(request->path.text, mode);
    int error = make_one(request->path.text, mode);
    return error == EBUSY ? EEXIST : error; /* "/" */
}
