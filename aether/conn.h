/* The connection to the edge: who may connect, frames in, frames out. One at a time, the newest
 * wins. */
#ifndef AETHER_CONN_H
#define AETHER_CONN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol.h"

int conn_listen(int fd);
bool conn_open(void);
void conn_input(bool force); /* reads and handles what came; forced before deadlines are judged */
bool conn_stalled(void);     /* a request waited for room in the output, and there is some now */
bool conn_has_room(void);
void conn_flush(void);
void conn_rest(void);               /* nothing much has happened for a while: gives memory back */
void conn_drain(uint64_t until_ns); /* blocks: the last words of a shutdown */

/* One frame at a time; without a connection all of these do nothing. A frame that does not fit
 * closes the connection (the edge comes back and learns what it missed): PID 1 neither blocks nor
 * grows. */
void out_begin(enum frame_type type, uint32_t stream);
void out_u8(uint8_t value);
void out_u16(uint16_t value);
void out_u32(uint32_t value);
void out_u64(uint64_t value);
void out_bytes(const void *data, size_t len);
void out_str(const char *text, size_t len);
void *out_reserve(size_t len); /* NULL: no room */
void out_end(void);

void reply_error(uint32_t stream, enum error_code code, int error, const char *message);
void reply_done(uint32_t stream, int error);

#endif
