/* File operations: run in a forked child that has become the user, stdin and stdout being the data.
 */
#ifndef AETHER_FILES_H
#define AETHER_FILES_H

#include <stdint.h>
#include <sys/stat.h>

#include "spawn.h"

int files_run(const struct file_request *request, uint64_t *value); /* 0 or an errno */

/* The directory that holds `path` and, in `name` (NAME_MAX + 1 bytes), what it is called there.
 * Descriptor or -errno. */
int files_parent(const char *path, char *name);

/* files_read.c */
int files_read(const struct file_request *request, uint64_t *value);
int files_list(const struct file_request *request, uint64_t *value);
int files_stat(const struct file_request *request);

/* files_write.c */
int files_write(const struct file_request *request);
int files_remove(const struct file_request *request);
int files_rename(const struct file_request *request);
int files_mkdir(const struct file_request *request);

#endif
