/* SPDX-License-Identifier: (Apache-2.0 OR GPL-2.0)
 *
 * The maps of the network policy. They are the policy's only state: programs read them, and a
 * successor of the process that filled them finds everything here. libhost/bpf/layout.py encodes
 * the same structures; tests/kernel/test_bpf_layout.py compares the two through BTF.
 *
 * Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d, so that one trie serves both families and an
 * IPv4-mapped connect() on an IPv6 socket meets the IPv4 rules.
 */
#ifndef DSEC_POLICY_H
#define DSEC_POLICY_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define MAX_SANDBOXES 16384
#define MAX_RULES (1 << 20)
#define MAX_DENIALS (1 << 16)
#define DENIALS_PER_SLOT 128
#define SANDBOX_ID_SIZE 64
#define UNKNOWN_SLOT 0 /* what belongs to no sandbox is counted here */

/* Slot to port: never compared by prefix, always wholly. */
#define KEY_BITS 96
#define FULL_KEY_BITS (KEY_BITS + 128)

enum mode { MODE_SEALED = 0, MODE_RULES = 1 };
enum verdict { VERDICT_DENY = 0, VERDICT_ALLOW = 1 };

enum hook {
	HOOK_SOCKET = 1,
	HOOK_CONNECT,
	HOOK_SENDMSG,
	HOOK_EGRESS,
	HOOK_LINK,
};

enum reason {
	ALLOWED = 0,
	UNLISTED,     /* no rule allows it */
	UNKNOWN,      /* no sandbox is registered for this cgroup or link */
	SPOOFED,      /* not the sandbox's own source address */
	MALFORMED,    /* options, a VLAN tag, a header cut short: nothing a socket sends */
	RAW_SOCKET,   /* a socket that is neither TCP nor UDP */
	HOST_NETWORK, /* an inet socket in the host's own network namespace */
};

struct addr {
	__u8 byte[16];
};

struct rule_key {
	__u32 prefixlen;
	__u32 slot;
	__u32 generation;
	__u8 protocol;
	__u8 family; /* 4 or 6: so that a prefix of IPv6, ::/0 say, never covers IPv4 */
	__be16 port; /* 0: any */
	struct addr addr;
};

/* generation in the low half, mode in the high half: a switch is seen whole or not at all. */
struct slot {
	__u64 active;
	struct addr own;
};

struct sandbox_key {
	char id[SANDBOX_ID_SIZE];
};

/* Written before anything else of a sandbox, removed after everything else: a journal. */
struct sandbox {
	__u64 cgroup_id;
	__u32 slot;
	__u32 ifindex;
	struct addr own;
};

struct counters {
	__u64 allowed;    /* packets let out */
	__u64 denied;     /* attempts and packets refused */
	__u64 turned_away; /* packets from outside that answer nothing */
	__u64 recorded;   /* entries in `denials` */
	__u64 unrecorded; /* refusals that found no room there */
};

struct denial_key {
	__u32 slot;
	__u16 protocol; /* IPPROTO_MPTCP is 262 */
	__u8 hook;
	__u8 reason;
	__be16 port;
	__u16 zero;
	struct addr addr;
};

struct denial {
	__u64 count;
	__u64 last_ns; /* CLOCK_BOOTTIME */
	__u32 pid;     /* 0 where the kernel, not the process, was running */
	char comm[16];
	__u32 zero;
};

#define HASH(name_, key_, value_, max_)                 \
	struct {                                        \
		__uint(type, BPF_MAP_TYPE_HASH);        \
		__uint(map_flags, BPF_F_NO_PREALLOC);   \
		__uint(max_entries, max_);              \
		__type(key, key_);                      \
		__type(value, value_);                  \
	} name_ SEC(".maps")

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_RULES);
	__type(key, struct rule_key);
	__type(value, __u8); /* enum verdict */
} rules SEC(".maps");

HASH(sandboxes, struct sandbox_key, struct sandbox, MAX_SANDBOXES);
HASH(slots, __u32, struct slot, MAX_SANDBOXES);
HASH(cgroups, __u64, __u32, MAX_SANDBOXES);
HASH(links, __u32, __u32, MAX_SANDBOXES);
HASH(counts, __u32, struct counters, MAX_SANDBOXES + 1);
HASH(denials, struct denial_key, struct denial, MAX_DENIALS);

#endif
