#include "user.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "root.h"

enum { PASSWD_FIELDS = 7, GROUP_FIELDS = 4 };

/* Splits the next line of *text at its colons, in place. Comments, short lines and NIS entries are
 * skipped. */
static bool next_entry(char **text, char *fields[], int wanted) {
    while (*text && **text) {
        char *line = *text, *end = strchr(line, '\n');
        if (end)
            *end = 0;
        *text = end ? end + 1 : NULL;
        int count = 0;
        for (char *field = line; field && count < wanted; count++) {
            fields[count] = field;
            field = strchr(field, ':');
            if (field)
                *field++ = 0;
        }
        if (count == wanted && *line && *line != '#' && *line != '+' && *line != '-')
            return true;
    }
    return false;
}

/* All digits and below 2^32 - 1, which setresuid() takes for "leave as it is". */
static bool parse_id(const char *text, uint32_t *id) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || value >= UINT32_MAX)
        return false;
    *id = (uint32_t)value;
    return true;
}

static int find_user(const char *name, struct identity *identity, const char **login) {
    uint32_t wanted = 0, uid, gid;
    bool numeric = parse_id(name, &wanted);
    int error;
    char *text = root_slurp("/etc/passwd", &error), *fields[PASSWD_FIELDS];
    while (next_entry(&text, fields, PASSWD_FIELDS)) {
        if (!parse_id(fields[2], &uid) || !parse_id(fields[3], &gid))
            continue;
        if (numeric ? uid != wanted : strcmp(fields[0], name) != 0)
            continue;
        identity->uid = uid;
        identity->gid = gid;
        identity->home = fields[5];
        *login = fields[0];
        return 0;
    }
    if (!numeric)
        return error ? error : ENOENT;
    identity->uid = wanted;
    identity->gid = 0;
    return 0;
}

static int find_group(const char *name, gid_t *gid) {
    if (parse_id(name, gid))
        return 0;
    int error;
    char *text = root_slurp("/etc/group", &error), *fields[GROUP_FIELDS];
    while (next_entry(&text, fields, GROUP_FIELDS))
        if (strcmp(fields[0], name) == 0 && parse_id(fields[2], gid))
            return 0;
    return error ? error : ENOENT;
}

static bool listed(const char *members, const char *login) {
    size_t len = strlen(login);
    for (const char *at = members; at; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, login, len) == 0 && (at[len] == ',' || !at[len]))
            return true;
    }
    return false;
}

static void find_supplementary(const char *login, struct identity *identity) {
    int error;
    uint32_t gid;
    char *text = root_slurp("/etc/group", &error), *fields[GROUP_FIELDS];
    identity->groups[identity->group_count++] = identity->gid;
    while (identity->group_count < MAX_GROUPS && next_entry(&text, fields, GROUP_FIELDS))
        if (parse_id(fields[2], &gid) && gid != identity->gid && listed(fields[3], login))
            identity->groups[identity->group_count++] = gid;
}

int user_resolve(const char *user, struct identity *identity) {
    char name[256];
    const char *colon = strchr(user, ':');
    size_t len = colon ? (size_t)(colon - user) : strlen(user);
    if (len >= sizeof name)
        return ENOENT;
    memcpy(name, user, len);
    name[len] = 0;
    *identity = (struct identity){0};

    const char *login = NULL;
    int error = find_user(len ? name : "0", identity, &login);
    /* An image without passwd still has root. */
    if (error && strcmp(name, "root") == 0) {
        *identity = (struct identity){0};
        error = 0;
    }
    if (error)
        return error;
    if (colon)
        return find_group(colon + 1, &identity->gid);
    if (login)
        find_supplementary(login, identity);
    return 0;
}
