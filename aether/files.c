#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>

#include "protocol.h"
#include "root.h"

int files_parent(const char *path, char *name) {
    size_t end = strlen(path);
    while (end > 0 && path[end - 1] == '/')
        end--;
    size_t start = end;
    while (start > 0 && path[start - 1] != '/')
        start--;
    size_t len = end - start;
    if (end == 0)
        return *path ? -EBUSY : -ENOENT; /* the root itself, or nothing */
    if (len > NAME_MAX || start >= PATH_MAX)
        return -ENAMETOOLONG;
    memcpy(name, path + start, len);
    name[len] = 0;
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return -EINVAL;
    char parent[PATH_MAX + 2] = "/";
    memcpy(parent + 1, path, start);
    parent[start + 1] = 0;
    return root_open(parent, O_RDONLY | O_DIRECTORY, 0);
}

int files_run(const struct file_request *request, uint64_t *value) {
    umask(0); /* modes are given or kept exactly */
    switch (request->op) {
    case FILE_READ:
        return files_read(request, value);
    case FILE_WRITE:
        return files_write(request);
    case FILE_LIST:
        return files_list(request, value);
    case FILE_STAT:
        return files_stat(request);
    case FILE_REMOVE:
        return files_remove(request);
    case FILE_RENAME:
        return files_rename(request);
    case FILE_MKDIR:
        return files_mkdir(request);
    }
    return ENOSYS;
}
