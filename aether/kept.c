#include "kept.h"

#include "loop.h"

static struct list unread = {&unread, &unread}, fresh = {&fresh, &fresh}, old = {&old, &old};
static int count, read_count;
static size_t chunks; /* of output, in all three */

static size_t chunks_of(const struct exec *exec) {
    return exec->out[0].ring.count + exec->out[1].ring.count;
}

/* Somebody is just reading it, or processes of it are alive and can only be reached through it. */
static bool in_use(const struct exec *exec) { return exec->stream || exec->tree.leader; }

static void move(struct exec *exec, struct list *to) {
    list_remove(&exec->link);
    list_append(to, &exec->link);
    exec->listed_ns = now_ns();
}

static void forget_output(struct exec *exec) {
    chunks -= chunks_of(exec);
    output_forget(&exec->out[0]);
    output_forget(&exec->out[1]);
}

int kept_count(void) { return count; }

/* --- giving way --- */

static bool give_output(struct list *from) {
    for (struct list *at = from->next; chunks > 0 && at != from; at = at->next) {
        struct exec *exec = container_of(at, struct exec, link);
        if (!exec->stream && chunks_of(exec) > 0) {
            forget_output(exec);
            return true;
        }
    }
    return false;
}

bool kept_give_output(void) { return give_output(&fresh) || give_output(&unread); }

static bool give_record(struct list *from) {
    for (struct list *at = from->next; at != from; at = at->next) {
        struct exec *exec = container_of(at, struct exec, link);
        if (!in_use(exec)) {
            exec_release(exec);
            return true;
        }
    }
    return false;
}

bool kept_give_record(void) {
    return give_record(&old) || give_record(&fresh) || give_record(&unread);
}

/* --- coming and going --- */

void kept_add(struct exec *exec) {
    count++;
    chunks += chunks_of(exec);
    move(exec, &unread);
    while (chunks * CHUNK > RETAIN_BYTES && kept_give_output()) {
    }
}

/* Results nobody has had are limited by how many commands can run, those that were read by
 * MAX_READ. */
void kept_read(struct exec *exec) {
    if (!exec->read)
        read_count++;
    exec->read = true;
    if (!exec->killing)
        move(exec, &fresh);
    while (read_count > MAX_READ && (give_record(&old) || give_record(&fresh))) {
    }
}

void kept_return(struct exec *exec) { move(exec, exec->read ? &fresh : &unread); }

void kept_remove(struct exec *exec) {
    count--;
    read_count -= exec->read;
    chunks -= chunks_of(exec);
}

/* --- time --- */

static uint64_t head_until(const struct list *list, uint64_t age) {
    return list_empty(list) ? UINT64_MAX
                            : container_of(list->next, struct exec, link)->listed_ns + age;
}

uint64_t kept_until(void) {
    uint64_t a = head_until(&unread, RETAIN_S * SECOND), b = head_until(&old, RETAIN_S * SECOND);
    uint64_t c = head_until(&fresh, RETAIN_READ_S * SECOND);
    a = a < b ? a : b;
    return a < c ? a : c;
}

/* Records that are too old are forgotten; what is in use goes to the end of its queue. */
static void expire(struct list *list, uint64_t age, uint64_t now) {
    while (head_until(list, age) <= now) {
        struct exec *exec = container_of(list->next, struct exec, link);
        if (in_use(exec))
            move(exec, list);
        else
            exec_release(exec);
    }
}

void kept_expire(uint64_t now) {
    while (head_until(&fresh, RETAIN_READ_S * SECOND) <= now) {
        struct exec *exec = container_of(fresh.next, struct exec, link);
        if (!exec->stream)
            forget_output(exec);
        move(exec, exec->stream ? &fresh : &old);
    }
    expire(&unread, RETAIN_S * SECOND, now);
    expire(&old, RETAIN_S * SECOND, now);
}
