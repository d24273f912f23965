"""From what a caller asks for to the rules that are enforced. Pure.

    none     nothing beyond the sandbox's own loopback
    allow    the union of the named services' rules and the caller's own
    public   the public internet, without what is private, reserved, the node's own, or kept back
             by the operator (`never`), plus the operator's `[public]` rules (a resolver, say)

An argument left out means none, never "as before"; what cannot be compiled wholly is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from types import MappingProxyType
from typing import Final

from libdsec.errors import InvalidArgument, NotFound, PermissionDenied, Unsupported
from libdsec.wire.sandbox import NetworkAllow, NetworkNone, NetworkPublic, NetworkSpec
from libhost.bpf.rule import Address, Mode, Network, Protocol, Rule

from .rules import parse_rule

MAX_RULES: Final = 4096  # of one sandbox, after ranges are expanded

# RFC 6890 and its registries: what is not the public internet. Of IPv6 only 2000::/3 is given
# out; what inside it embeds an IPv4 address could lead back into a private network.
_WHOLE: Final = tuple(map(ip_network, ("0.0.0.0/0", "2000::/3")))
_NOT_PUBLIC: Final = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
            "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16",
            "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
            "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
        ),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Alias:
    """What an operator lets one name stand for."""

    rules: tuple[Rule, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AliasTable:
    """The operator's file as a value. `missing` says why there is none, and is "" otherwise."""

    path: str
    services: Mapping[str, Alias] = field(default_factory=dict)
    public: Alias = Alias()
    never: tuple[Network, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Compiled:
    mode: Mode
    rules: frozenset[Rule] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)


def compile_network(
    network: NetworkSpec,
    aliases: AliasTable,
    node_addresses: Callable[[], Collection[Address]] = frozenset,
) -> Compiled:
    """What `network` means on this node.

    Raises:
        InvalidArgument, NotFound, PermissionDenied, Unsupported: each names the rule, alias or file
            and says what to do.
    """
    match network:
        case NetworkNone():
            return Compiled(Mode.SEALED)
        case NetworkAllow():
            return _allow(network, aliases)
        case NetworkPublic():
            return _public(aliases, node_addresses())


def _allow(network: NetworkAllow, aliases: AliasTable) -> Compiled:
    own = [rule for text in network.rules for rule in _caller_rule(text, aliases)]
    named = {name: _service(name, aliases) for name in dict.fromkeys(network.services)}
    rules = frozenset(own).union(*(alias.rules for alias in named.values()))
    if len(rules) > MAX_RULES:
        hint = f"at most {MAX_RULES}; use prefixes or :* instead of many addresses or ports"
        raise InvalidArgument(f"the network has {len(rules)} rules", hint=hint)
    env = _merged("environment variable", ((n, alias.env) for n, alias in named.items()))
    hosts = _merged("host name", ((n, alias.hosts) for n, alias in named.items()))
    return Compiled(Mode.RULES, rules, env, hosts)


def _public(aliases: AliasTable, node_addresses: Collection[Address]) -> Compiled:
    if aliases.missing:
        # What the operator keeps back is in that file: without it nothing can be known to be safe.
        raise _no_file("Network.public()", aliases)
    # Of the node's own addresses only what would be open otherwise: link-local ones come and go
    # with every sandbox, and equal policies must stay equal.
    exposed = {ip_network(a) for a in node_addresses if _is_public(a)}
    everything = {Rule(protocol, network) for protocol in Protocol for network in _WHOLE}
    extra = aliases.public
    # An operator who lists exactly a reserved network means it; `never` is meant even more.
    reserved = _denied(_NOT_PUBLIC) - {replace(rule, allow=False) for rule in extra.rules}
    kept_back = _denied({*aliases.never, *exposed})
    rules = everything | reserved | kept_back | set(extra.rules)
    return Compiled(Mode.RULES, frozenset(rules), extra.env, extra.hosts)


def _denied(networks: Iterable[Network]) -> set[Rule]:
    return {Rule(p, network, allow=False) for p in Protocol for network in networks}


def _is_public(address: Address) -> bool:
    def within(networks: Iterable[Network]) -> bool:
        return any(n.version == address.version and address in n for n in networks)

    return within(_WHOLE) and not within(_NOT_PUBLIC)


def _caller_rule(text: str, aliases: AliasTable) -> tuple[Rule, ...]:
    rules = parse_rule(text)
    for kept in aliases.never:
        if _overlap(kept, rules[0].network):
            raise PermissionDenied(
                f"network rule {text!r} reaches into {kept}, which the operator keeps back",
                hint=f"`never` in {aliases.path}; leave {kept} out, or use a service alias",
            )
    return rules


def _overlap(one: Network, other: Network) -> bool:
    return one.version == other.version and one.overlaps(other)


def _service(name: str, aliases: AliasTable) -> Alias:
    if aliases.missing:
        raise _no_file(f"service alias {name!r}", aliases)
    alias = aliases.services.get(name)
    if alias is None:
        known = ", ".join(sorted(aliases.services)) or "none"
        raise NotFound(
            f"there is no service alias {name!r} in {aliases.path} (known: {known})",
            hint=f"the node's operator adds [services.{name}] with `rules` to that file",
        )
    return alias


def _no_file(what: str, aliases: AliasTable) -> Unsupported:
    return Unsupported(
        f"{what} needs the node's alias file {aliases.path}, and {aliases.missing}",
        hint=f"the node's operator writes {aliases.path}; it is read again by itself",
    )


def _merged(what: str, given: Iterable[tuple[str, Mapping[str, str]]]) -> Mapping[str, str]:
    merged: dict[str, str] = {}
    source: dict[str, str] = {}
    for service, entries in given:
        for key, value in entries.items():
            if merged.setdefault(key, value) != value:
                raise InvalidArgument(
                    f"the services {source[key]!r} and {service!r} disagree on the {what} {key!r}",
                    hint="name only one of them",
                )
            source.setdefault(key, service)
    return MappingProxyType(merged)
