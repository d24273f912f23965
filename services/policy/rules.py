"""The grammar of one network rule.

    tcp:10.0.0.5:443            one address, one port
    udp:10.0.0.0/8:53           a prefix
    tcp:10.0.0.5:8000-8031      a range of ports, at most MAX_RANGE of them
    tcp:10.0.0.5:*              every port
    tcp:[2001:db8::/32]:443     IPv6 in brackets

Names are not rules: who answers for a name can change after it was checked, an address cannot. A
service alias gives both, the address in its rules and the name in its `hosts`.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final

from libdsec.errors import InvalidArgument
from libhost.bpf.rule import ANY_PORT, Network, Protocol, Rule

MAX_RANGE: Final = 256

_GRAMMAR: Final = "a rule is tcp|udp:ADDRESS[/PREFIX]:PORT, :FIRST-LAST or :*; IPv6 in [brackets]"
_RULE: Final = re.compile(
    r"(?P<protocol>[a-z]+):(?:\[(?P<six>[^\]]*)\]|(?P<four>[^:\[\]]*))"
    r":(?:(?P<any>\*)|(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?)"
)


def parse_rule(text: str) -> tuple[Rule, ...]:
    """The rules that a text stands for, one per port.

    Raises:
        InvalidArgument: it names the text and what is wrong with it.
    """
    m = _RULE.fullmatch(text)
    if m is None or m["protocol"].upper() not in Protocol.__members__:
        raise _invalid(text, "is not one", _GRAMMAR)
    protocol = Protocol[m["protocol"].upper()]
    network = _network(text, m["six"] if m["four"] is None else m["four"])
    if (network.version == 6) != (m["six"] is not None):
        raise _invalid(text, "has an address of the other family", _GRAMMAR)
    if m["any"]:
        return (Rule(protocol, network, ANY_PORT),)
    return tuple(Rule(protocol, network, port) for port in _ports(text, m))


def parse_network(text: str) -> Network:
    """An address or prefix by itself. Raises InvalidArgument naming it."""
    return _network(text, text)


def _ports(text: str, m: re.Match[str]) -> range:
    first = int(m["first"])
    last = int(m["last"] or first)
    if not 1 <= first <= last <= 65535:
        raise _invalid(text, "has ports that are not within 1-65535, rising", _GRAMMAR)
    if last - first + 1 > MAX_RANGE:
        hint = f"at most {MAX_RANGE} ports; use :* for all of them"
        raise _invalid(text, f"covers {last - first + 1} ports", hint)
    return range(first, last + 1)


def _network(text: str, address: str) -> Network:
    try:
        network: IPv4Network | IPv6Network = ip_network(address)
    except ValueError as err:
        if _is_name(address):
            hint = "rules hold addresses; a name is reached through a service alias"
            raise _invalid(text, f"names the host {address!r}", hint) from err
        raise _invalid(text, f"has no valid address: {err}", _GRAMMAR) from err
    if network.version == 6 and network.network_address.ipv4_mapped is not None:
        raise _invalid(text, "has an IPv4-mapped address", "write the IPv4 address itself")
    return network


def _is_name(address: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9.-]*[A-Za-z][A-Za-z0-9.-]*", address) is not None


def _invalid(text: str, what: str, hint: str) -> InvalidArgument:
    return InvalidArgument(f"network rule {text[:80]!r} {what}", hint=hint)
