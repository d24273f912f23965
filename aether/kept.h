/* What is kept of commands that have ended, within bounds: `unread` until an edge has had all of
 * it, then `fresh` with its output, then `old` without. Each is in order of time; a record is in
 * exactly one, by its `link`. */
#ifndef AETHER_KEPT_H
#define AETHER_KEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "exec.h"

void kept_add(struct exec *exec);    /* it has just ended */
void kept_read(struct exec *exec);   /* an edge has had its output and EXIT */
void kept_return(struct exec *exec); /* after it was in `exec_watched` again, to be killed */
void kept_remove(struct exec *exec);

bool kept_give_output(void); /* the least missed one; false: there is none to give */
bool kept_give_record(void); /* likewise, the whole record */
uint64_t kept_until(void);
void kept_expire(uint64_t now);
int kept_count(void);

#endif
