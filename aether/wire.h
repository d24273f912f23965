/* Reading a payload: a cursor that goes bad at the first violation and stays so; check `wire_done`
 * at the end. */
#ifndef AETHER_WIRE_H
#define AETHER_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct wire {
    const uint8_t *at, *end;
    bool bad;
};

struct str {
    const char *text; /* NUL-terminated inside the frame */
    uint32_t len;
};

static inline struct wire wire_over(const uint8_t *data, size_t len) {
    return (struct wire){data, data + len, false};
}

static inline void wire_take(struct wire *w, void *to, size_t len) {
    if (w->bad || (size_t)(w->end - w->at) < len) {
        w->bad = true;
        memset(to, 0, len);
        return;
    }
    memcpy(to, w->at, len);
    w->at += len;
}

#define WIRE_NUMBER(type, name)                                                                    \
    static inline type name(struct wire *w) {                                                      \
        type value;                                                                                \
        wire_take(w, &value, sizeof value);                                                        \
        return value;                                                                              \
    }
WIRE_NUMBER(uint8_t, wire_u8)
WIRE_NUMBER(uint32_t, wire_u32)
WIRE_NUMBER(uint64_t, wire_u64)
#undef WIRE_NUMBER

static inline struct str wire_str(struct wire *w) {
    uint32_t len = wire_u32(w);
    if (w->bad || (size_t)(w->end - w->at) <= len ||
        memchr(w->at, 0, (size_t)len + 1) != w->at + len) {
        w->bad = true;
        return (struct str){"", 0};
    }
    struct str s = {(const char *)w->at, len};
    w->at += len + 1;
    return s;
}

static inline bool wire_done(const struct wire *w) { return !w->bad && w->at == w->end; }

#endif
