/* SPDX-License-Identifier: (Apache-2.0 OR GPL-2.0)
 *
 * What a packet says about itself: protocol, addresses, ports. Strict: what no ordinary socket
 * sends (IP options, IPv6 extension headers, IPv4-mapped addresses in an IPv6 header) is malformed,
 * because a filter and a router that read such a header differently are a hole.
 */
#ifndef DSEC_PACKET_H
#define DSEC_PACKET_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <stdbool.h>

#include "policy.h"

#define IP_LATER_FRAGMENT 0x1fff
#define TCP_SYN 0x02
#define TCP_ACK 0x10
/* linux/icmp.h and linux/if_arp.h need the C library's headers, which this target has not. */
#define ICMP_HEADER_SIZE 8
#define ICMP_DEST_UNREACH 3
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12
#define ICMPV6_DEST_UNREACH 1
#define ICMPV6_PARAMETER_PROBLEM 4
#define ARP_SENDER_IPV4 14 /* header and sender's hardware address */
#define NDP_SOLICIT 135
#define NDP_ADVERT 136
#define NDP_HOP_LIMIT 255 /* no router forwards one: it would arrive with less */

struct packet {
	struct addr src;
	struct addr dst;
	__u32 body; /* offset of what follows the IP header */
	__be16 sport;
	__be16 dport;
	__u8 version;
	__u8 protocol;
	__u8 hop_limit;
	__u8 tcp_flags;
	__u8 icmp_type;
	bool later_fragment;
};

static __always_inline int load(struct __sk_buff *skb, __u32 offset, void *to, __u32 size)
{
	return bpf_skb_load_bytes_relative(skb, offset, to, size, BPF_HDR_START_NET);
}

static __always_inline void map_ipv4(struct addr *to, __be32 ipv4)
{
	*(__u64 *)&to->byte[0] = 0;
	*(__u32 *)&to->byte[8] = bpf_htonl(0xffff);
	*(__u32 *)&to->byte[12] = ipv4;
}

static __always_inline bool is_mapped(const struct addr *a)
{
	return *(__u64 *)&a->byte[0] == 0 && *(__u32 *)&a->byte[8] == bpf_htonl(0xffff);
}

static __always_inline bool is_zero(const struct addr *a)
{
	return (*(__u64 *)&a->byte[0] | *(__u64 *)&a->byte[8]) == 0;
}

static __always_inline bool same(const struct addr *a, const struct addr *b)
{
	return *(__u64 *)&a->byte[0] == *(__u64 *)&b->byte[0] &&
	       *(__u64 *)&a->byte[8] == *(__u64 *)&b->byte[8];
}

/* The unspecified address is here too: to connect to it is to connect to oneself. */
static __always_inline bool is_loopback(const struct addr *a)
{
	__u32 last = *(__u32 *)&a->byte[12];

	if (is_mapped(a))
		return a->byte[12] == 127 || last == 0;
	return *(__u64 *)&a->byte[0] == 0 && *(__u32 *)&a->byte[8] == 0 &&
	       (last == 0 || last == bpf_htonl(1));
}

static __always_inline bool is_link_scope(const struct addr *a)
{
	return (a->byte[0] == 0xfe && (a->byte[1] & 0xc0) == 0x80) ||
	       (a->byte[0] == 0xff && (a->byte[1] & 0x0f) == 0x02);
}

static __always_inline int parse_ipv4(struct __sk_buff *skb, __u32 at, struct packet *p)
{
	struct iphdr ip;

	if (load(skb, at, &ip, sizeof(ip)) || ip.ihl != 5)
		return -1;
	map_ipv4(&p->src, ip.saddr);
	map_ipv4(&p->dst, ip.daddr);
	p->protocol = ip.protocol;
	p->hop_limit = ip.ttl;
	p->later_fragment = ip.frag_off & bpf_htons(IP_LATER_FRAGMENT);
	p->body = at + sizeof(ip);
	return 0;
}

static __always_inline int parse_ipv6(struct __sk_buff *skb, __u32 at, struct packet *p)
{
	struct ipv6hdr ip;

	if (load(skb, at, &ip, sizeof(ip)))
		return -1;
	__builtin_memcpy(&p->src, &ip.saddr, sizeof(p->src));
	__builtin_memcpy(&p->dst, &ip.daddr, sizeof(p->dst));
	if (is_mapped(&p->src) || is_mapped(&p->dst))
		return -1;
	p->protocol = ip.nexthdr;
	p->hop_limit = ip.hop_limit;
	p->body = at + sizeof(ip);
	return 0;
}

/* Addresses and ports of the IP packet at `at`, counted from the network header. */
static __always_inline int parse(struct __sk_buff *skb, __u32 at, struct packet *p)
{
	__be16 ports[2];
	__u8 first;

	__builtin_memset(p, 0, sizeof(*p));
	if (load(skb, at, &first, 1))
		return -1;
	p->version = first >> 4;
	if (p->version == 4 ? parse_ipv4(skb, at, p)
			    : p->version == 6 ? parse_ipv6(skb, at, p) : -1)
		return -1;
	if (p->later_fragment)
		return 0;
	if (p->protocol == IPPROTO_ICMP || p->protocol == IPPROTO_ICMPV6)
		return load(skb, p->body, &p->icmp_type, 1);
	if (p->protocol != IPPROTO_TCP && p->protocol != IPPROTO_UDP)
		return 0;
	if (load(skb, p->body, ports, sizeof(ports)))
		return -1;
	p->sport = ports[0];
	p->dport = ports[1];
	return 0;
}

/* A packet quoted in an ICMP error may end before the flags; a real one may not. */
static __always_inline int parse_tcp_flags(struct __sk_buff *skb, struct packet *p)
{
	if (p->protocol != IPPROTO_TCP || p->later_fragment)
		return 0;
	return load(skb, p->body + 13, &p->tcp_flags, 1);
}

static __always_inline bool is_ndp(const struct packet *p)
{
	return p->version == 6 && p->protocol == IPPROTO_ICMPV6 &&
	       (p->icmp_type == NDP_SOLICIT || p->icmp_type == NDP_ADVERT) &&
	       p->hop_limit == NDP_HOP_LIMIT;
}

static __always_inline bool is_icmp_error(const struct packet *p)
{
	if (p->version == 4)
		return p->protocol == IPPROTO_ICMP &&
		       (p->icmp_type == ICMP_DEST_UNREACH || p->icmp_type == ICMP_TIME_EXCEEDED ||
			p->icmp_type == ICMP_PARAMETERPROB);
	return p->protocol == IPPROTO_ICMPV6 && p->icmp_type >= ICMPV6_DEST_UNREACH &&
	       p->icmp_type <= ICMPV6_PARAMETER_PROBLEM;
}

#endif
