"""The grammar of a rule: what it stands for, and what is refused by name."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libdsec.errors import InvalidArgument
from libhost.bpf.rule import ANY_PORT, Protocol, Rule
from services.policy.rules import MAX_RANGE, parse_rule


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("tcp:10.0.0.5:443", [Rule(Protocol.TCP, ip_network("10.0.0.5/32"), 443)]),
        ("udp:10.0.0.0/8:53", [Rule(Protocol.UDP, ip_network("10.0.0.0/8"), 53)]),
        ("tcp:10.0.0.5:*", [Rule(Protocol.TCP, ip_network("10.0.0.5"), ANY_PORT)]),
        ("tcp:0.0.0.0/0:80-81", [Rule(Protocol.TCP, ip_network("0.0.0.0/0"), p) for p in (80, 81)]),
        ("tcp:[2001:db8::/32]:443", [Rule(Protocol.TCP, ip_network("2001:db8::/32"), 443)]),
        ("udp:[::1]:53", [Rule(Protocol.UDP, ip_network("::1/128"), 53)]),
    ],
)
def test_rule_stands_for_addresses_and_ports(text: str, rules: list[Rule]) -> None:
    assert list(parse_rule(text)) == rules


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "is not one"),
        ("tcp", "is not one"),
        ("10.0.0.5:443", "is not one"),
        ("icmp:10.0.0.5:0", "is not one"),
        ("TCP:10.0.0.5:443", "is not one"),
        ("tcp:10.0.0.5", "is not one"),
        ("tcp:10.0.0.5:https", "is not one"),
        ("tcp:10.0.0.5:443 ", "is not one"),
        ("tcp:2001:db8::1:443", "is not one"),
        ("tcp:[10.0.0.5]:443", "other family"),
        ("tcp::443", "no valid address"),
        ("tcp:10.0.0.300:443", "no valid address"),
        ("tcp:10.0.0.5/8:443", "host bits set"),
        ("tcp:10.0.0.0/33:443", "no valid address"),
        ("tcp:[::ffff:10.0.0.5]:443", "IPv4-mapped"),
        ("tcp:10.0.0.5:0", "1-65535"),
        ("tcp:10.0.0.5:65536", "1-65535"),
        ("tcp:10.0.0.5:90-80", "rising"),
        (f"tcp:10.0.0.5:1-{MAX_RANGE + 1}", f"covers {MAX_RANGE + 1} ports"),
        ("tcp:pypi.org:443", "names the host 'pypi.org'"),
    ],
)
def test_what_is_no_rule_is_refused_by_name(text: str, fact: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_rule(text)
    assert fact in caught.value.message
    assert repr(text) in caught.value.message
    assert caught.value.hint


@given(st.text(max_size=60))
def test_any_text_is_a_rule_or_an_invalid_argument(text: str) -> None:
    try:
        rules = parse_rule(text)
    except InvalidArgument:
        return
    assert 1 <= len(rules) <= MAX_RANGE


@given(
    st.sampled_from(Protocol),
    st.one_of(
        st.ip_addresses(v=4).map(ip_network),
        st.ip_addresses(v=6).filter(lambda a: not a.ipv4_mapped).map(ip_network),
    ),
    st.one_of(st.just(ANY_PORT), st.integers(1, 65535)),
)
def test_a_rule_prints_as_what_it_is_parsed_from(protocol, network, port) -> None:  # type: ignore[no-untyped-def]
    rule = Rule(protocol, network, port)
    assert parse_rule(str(rule)) == (rule,)
