/* SPDX-License-Identifier: (Apache-2.0 OR GPL-2.0)
 *
 * Network policy of a node's sandboxes.
 *
 * Programs on the node's parent cgroup are attached once; they find the sandbox by the ancestor at
 * `sandbox_level`, give the caller an early EPERM and say which process it was. Programs on the host
 * end of a sandbox's veth find it by interface; they see every frame, whatever socket it came from,
 * and have the last word. Neither keeps connections: what may be sent to may answer.
 *
 * Invariants: what is in no map is denied; the rules in force are those of the slot's one active
 * generation; nothing from outside opens a connection into a sandbox.
 */
#include "packet.h"

#define LOOPBACK_IFINDEX 1
#define PASS 1
#define BLOCK 0
/* tcx and clsact alike: the next program may still object, or nobody may send it. */
#define LINK_PASS (-1)
#define LINK_DROP 2

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Depth of a sandbox's own cgroup in the hierarchy; set by the loader. */
const volatile __u32 sandbox_level = 3;

static __always_inline enum reason look_up(struct rule_key *key)
{
	__u8 *verdict = bpf_map_lookup_elem(&rules, key);

	if (!verdict && key->port) {
		key->port = 0;
		verdict = bpf_map_lookup_elem(&rules, key);
	}
	return verdict && *verdict == VERDICT_ALLOW ? ALLOWED : UNLISTED;
}

/* May this slot exchange packets with that peer? A port of 0 asks for a rule of all ports. */
static __noinline enum reason judge(__u32 slot, __u64 active, __u32 protocol_port,
				    const struct addr *peer)
{
	struct rule_key key = { .prefixlen = FULL_KEY_BITS, .slot = slot };

	if (!peer || active >> 32 != MODE_RULES)
		return UNLISTED;
	key.generation = (__u32)active;
	key.protocol = protocol_port >> 16;
	key.family = is_mapped(peer) ? 4 : 6;
	key.port = (__be16)protocol_port;
	key.addr = *peer;
	return look_up(&key);
}

static __always_inline enum reason judge_peer(__u32 slot, struct slot *s, __u8 protocol,
					      __be16 port, const struct addr *peer)
{
	__u64 active = *(volatile __u64 *)&s->active;

	return judge(slot, active, (__u32)protocol << 16 | port, peer);
}

static __always_inline void count_allowed(__u32 slot)
{
	struct counters *c = bpf_map_lookup_elem(&counts, &slot);

	if (c)
		__sync_fetch_and_add(&c->allowed, 1);
}

/* Outsiders are only counted: a port scan of theirs must not crowd out the sandbox's own audit. */
static __always_inline void count_turned_away(__u32 slot)
{
	struct counters *c = bpf_map_lookup_elem(&counts, &slot);

	if (c)
		__sync_fetch_and_add(&c->turned_away, 1);
}

static __noinline int record(const struct denial_key *key, const struct denial *fresh)
{
	struct counters *c;
	struct denial *known;

	if (!key || !fresh)
		return 0;
	c = bpf_map_lookup_elem(&counts, &key->slot);
	if (!c)
		return 0;
	__sync_fetch_and_add(&c->denied, 1);
	known = bpf_map_lookup_elem(&denials, key);
	if (known) {
		__sync_fetch_and_add(&known->count, 1);
		known->last_ns = fresh->last_ns;
		return 0;
	}
	if (c->recorded < DENIALS_PER_SLOT &&
	    bpf_map_update_elem(&denials, key, fresh, BPF_NOEXIST) == 0)
		__sync_fetch_and_add(&c->recorded, 1);
	else
		__sync_fetch_and_add(&c->unrecorded, 1);
	return 0;
}

static __always_inline void deny(__u32 slot, enum hook hook, enum reason reason, __u16 protocol,
				 __be16 port, const struct addr *addr, bool in_process)
{
	struct denial_key key = {
		.slot = slot, .hook = hook, .reason = reason, .protocol = protocol, .port = port,
	};
	struct denial fresh = { .count = 1, .last_ns = bpf_ktime_get_boot_ns() };

	if (addr)
		key.addr = *addr;
	if (in_process) {
		fresh.pid = bpf_get_current_pid_tgid() >> 32;
		bpf_get_current_comm(fresh.comm, sizeof(fresh.comm));
	}
	record(&key, &fresh);
}

/* --- sockets of the node's parent cgroup --- */

static __always_inline __u32 current_slot(void)
{
	__u64 id = bpf_get_current_ancestor_cgroup_id(sandbox_level);
	__u32 *slot = bpf_map_lookup_elem(&cgroups, &id);

	return slot ? *slot : UNKNOWN_SLOT;
}

SEC("cgroup/sock_create")
int on_socket(struct bpf_sock *sk)
{
	__u32 slot = current_slot(), type = sk->type, protocol = sk->protocol;
	enum reason reason = ALLOWED;

	if (slot == UNKNOWN_SLOT)
		reason = UNKNOWN;
	else if (bpf_get_netns_cookie(sk) == bpf_get_netns_cookie(NULL))
		reason = HOST_NETWORK;
	else if (!(type == 1 /* SOCK_STREAM */ && protocol == IPPROTO_TCP) &&
		 !(type == 2 /* SOCK_DGRAM */ && protocol == IPPROTO_UDP))
		reason = RAW_SOCKET;
	if (reason == ALLOWED)
		return PASS;
	deny(slot, HOOK_SOCKET, reason, protocol, 0, NULL, true);
	return BLOCK;
}

static __always_inline int on_address(struct bpf_sock_addr *ctx, enum hook hook,
				      const struct addr *to)
{
	__u32 slot = current_slot();
	struct slot *s = bpf_map_lookup_elem(&slots, &slot);
	__be16 port = (__be16)ctx->user_port;
	__u8 protocol = ctx->protocol;
	enum reason reason = UNKNOWN;

	if (s) {
		if (is_loopback(to) || same(to, &s->own))
			return PASS;
		reason = judge_peer(slot, s, protocol, port, to);
	}
	if (reason == ALLOWED)
		return PASS;
	deny(slot, hook, reason, protocol, port, to, true);
	return BLOCK;
}

static __always_inline int on_address4(struct bpf_sock_addr *ctx, enum hook hook)
{
	struct addr to;

	map_ipv4(&to, ctx->user_ip4);
	return on_address(ctx, hook, &to);
}

static __always_inline int on_address6(struct bpf_sock_addr *ctx, enum hook hook)
{
	struct addr to;

	*(__u32 *)&to.byte[0] = ctx->user_ip6[0];
	*(__u32 *)&to.byte[4] = ctx->user_ip6[1];
	*(__u32 *)&to.byte[8] = ctx->user_ip6[2];
	*(__u32 *)&to.byte[12] = ctx->user_ip6[3];
	return on_address(ctx, hook, &to);
}

SEC("cgroup/connect4")
int on_connect4(struct bpf_sock_addr *ctx)
{
	return on_address4(ctx, HOOK_CONNECT);
}

SEC("cgroup/connect6")
int on_connect6(struct bpf_sock_addr *ctx)
{
	return on_address6(ctx, HOOK_CONNECT);
}

SEC("cgroup/sendmsg4")
int on_sendmsg4(struct bpf_sock_addr *ctx)
{
	return on_address4(ctx, HOOK_SENDMSG);
}

SEC("cgroup/sendmsg6")
int on_sendmsg6(struct bpf_sock_addr *ctx)
{
	return on_address6(ctx, HOOK_SENDMSG);
}

/* --- packets of those sockets; the cgroup is the one the socket was created in --- */

static __always_inline __u32 packet_slot(struct __sk_buff *skb)
{
	__u64 id = bpf_skb_ancestor_cgroup_id(skb, sandbox_level);
	__u32 *slot = bpf_map_lookup_elem(&cgroups, &id);

	return slot ? *slot : UNKNOWN_SLOT;
}

SEC("cgroup_skb/egress")
int on_egress(struct __sk_buff *skb)
{
	__u32 slot = packet_slot(skb);
	struct slot *s = bpf_map_lookup_elem(&slots, &slot);
	enum reason reason = UNKNOWN;
	struct packet p = {};

	/* Sockets only exist in the sandbox's own network namespace, where loopback is its own. */
	if (s && skb->ifindex == LOOPBACK_IFINDEX)
		return PASS;
	if (parse(skb, 0, &p))
		reason = MALFORMED;
	else if (s)
		reason = judge_peer(slot, s, p.protocol, p.dport, &p.dst);
	if (reason == ALLOWED)
		return PASS;
	deny(slot, HOOK_EGRESS, reason, p.protocol, p.dport, &p.dst, false);
	return BLOCK;
}

/* Only answers come in: from a peer that may be sent to, and never a first SYN. */
static __always_inline bool is_answer(__u32 slot, struct slot *s, const struct packet *p)
{
	if ((p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN)
		return false;
	return judge_peer(slot, s, p->protocol, p->sport, &p->src) == ALLOWED;
}

SEC("cgroup_skb/ingress")
int on_ingress(struct __sk_buff *skb)
{
	__u32 slot = packet_slot(skb);
	struct slot *s = bpf_map_lookup_elem(&slots, &slot);
	struct packet p;

	if (s && skb->ifindex == LOOPBACK_IFINDEX)
		return PASS;
	if (s && !parse(skb, 0, &p) && !parse_tcp_flags(skb, &p) && is_answer(slot, s, &p))
		return PASS;
	count_turned_away(slot);
	return BLOCK;
}

/* --- the host end of a sandbox's veth --- */

static __always_inline struct slot *link_slot(struct __sk_buff *skb, __u32 *slot)
{
	__u32 ifindex = skb->ifindex;
	__u32 *found = bpf_map_lookup_elem(&links, &ifindex);

	*slot = found ? *found : UNKNOWN_SLOT;
	return bpf_map_lookup_elem(&slots, slot);
}

/* A sandbox may ask who has an address, and say that it has its own; no more. */
static __always_inline bool is_honest_arp(struct __sk_buff *skb, const struct slot *s)
{
	struct addr sender;
	__be32 ipv4;

	if (load(skb, ARP_SENDER_IPV4, &ipv4, sizeof(ipv4)))
		return false;
	map_ipv4(&sender, ipv4);
	return same(&sender, &s->own);
}

static __always_inline enum reason judge_frame(struct __sk_buff *skb, __u32 slot, struct slot *s,
					       struct packet *p)
{
	bool own;

	if (skb->vlan_present || parse(skb, 0, p) || parse_tcp_flags(skb, p))
		return MALFORMED;
	own = same(&p->src, &s->own) && !is_zero(&s->own);
	/* Neighbour discovery, where the link has IPv6 at all; it cannot leave the link. */
	if (is_ndp(p) && !is_zero(&s->own) && !is_mapped(&s->own) && is_link_scope(&p->dst) &&
	    (own || is_link_scope(&p->src)))
		return ALLOWED;
	if (!own)
		return SPOOFED;
	return judge_peer(slot, s, p->protocol, p->dport, &p->dst);
}

SEC("tc")
int on_link_out(struct __sk_buff *skb)
{
	__u32 slot;
	struct slot *s = link_slot(skb, &slot);
	enum reason reason = UNKNOWN;
	struct packet p = {};

	if (s && skb->protocol == bpf_htons(ETH_P_ARP) && is_honest_arp(skb, s))
		return LINK_PASS;
	if (s && (skb->protocol == bpf_htons(ETH_P_IP) || skb->protocol == bpf_htons(ETH_P_IPV6)))
		reason = judge_frame(skb, slot, s, &p);
	else if (s)
		reason = MALFORMED;
	if (reason == ALLOWED) {
		count_allowed(slot);
		return LINK_PASS;
	}
	/* What every kernel says to its IPv6 neighbours on its own account is no attempt at all. */
	if (p.version == 6 && p.protocol != IPPROTO_TCP && p.protocol != IPPROTO_UDP &&
	    is_link_scope(&p.dst))
		return LINK_DROP;
	deny(slot, HOOK_LINK, reason, p.protocol, p.dport, &p.dst, false);
	return LINK_DROP;
}

/* "Too big", "unreachable": for a packet that this sandbox may have sent. */
static __always_inline bool is_error_about(struct __sk_buff *skb, __u32 slot, struct slot *s,
					   const struct packet *p)
{
	struct packet quoted;

	if (p->later_fragment || !is_icmp_error(p))
		return false;
	if (parse(skb, p->body + ICMP_HEADER_SIZE, &quoted) || !same(&quoted.src, &s->own))
		return false;
	return judge_peer(slot, s, quoted.protocol, quoted.dport, &quoted.dst) == ALLOWED;
}

static __always_inline bool may_enter(struct __sk_buff *skb, __u32 slot, struct slot *s)
{
	struct packet p;

	if (skb->protocol == bpf_htons(ETH_P_ARP))
		return true;
	if (parse(skb, 0, &p) || parse_tcp_flags(skb, &p) || is_zero(&s->own))
		return false;
	if (is_ndp(&p) && !is_mapped(&s->own))
		return true;
	if (!same(&p.dst, &s->own) || same(&p.src, &s->own))
		return false;
	/* Useless without the first fragment, which is judged; ports are only in that one. */
	if (p.later_fragment)
		return true;
	return is_error_about(skb, slot, s, &p) || is_answer(slot, s, &p);
}

SEC("tc")
int on_link_in(struct __sk_buff *skb)
{
	__u32 slot;
	struct slot *s = link_slot(skb, &slot);

	if (s && may_enter(skb, slot, s))
		return LINK_PASS;
	count_turned_away(slot);
	return LINK_DROP;
}
