/* Intrusive doubly linked list; an unlinked node points at itself. */
#ifndef AETHER_LIST_H
#define AETHER_LIST_H

#include <stdbool.h>
#include <stddef.h>

#define container_of(pointer, type, member) ((type *)((char *)(pointer) - offsetof(type, member)))

struct list {
    struct list *prev, *next;
};

static inline void list_init(struct list *node) { node->prev = node->next = node; }

static inline bool list_empty(const struct list *node) { return node->next == node; }

static inline void list_append(struct list *head, struct list *node) {
    node->prev = head->prev;
    node->next = head;
    head->prev->next = node;
    head->prev = node;
}

static inline void list_remove(struct list *node) {
    node->prev->next = node->next;
    node->next->prev = node->prev;
    list_init(node);
}

#endif
