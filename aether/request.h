/* The edge's requests: parsing, and handing them to what carries them out. */
#ifndef AETHER_REQUEST_H
#define AETHER_REQUEST_H

#include <stddef.h>
#include <stdint.h>

void request_init(const uint8_t boot_id[16]);
void request_hello(void);

/* NULL, or what is malformed about the frame. */
const char *request_handle(uint8_t type, uint32_t stream, const uint8_t *payload, size_t len);

#endif
