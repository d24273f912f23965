"""What each kind of network means, and what is refused."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from libdsec.errors import DSecError, InvalidArgument, NotFound, PermissionDenied, Unsupported
from libdsec.wire.sandbox import NetworkAllow, NetworkNone, NetworkPublic
from libhost.bpf.rule import Mode, Protocol, Rule
from libhost.flow_child import Flow, is_allowed
from services.policy.compile import MAX_RULES, Alias, AliasTable, compile_network
from services.policy.rules import parse_rule

PYPI = Alias(
    parse_rule("tcp:10.0.0.5:443"), {"PIP_INDEX_URL": "https://m/simple"}, {"m": "10.0.0.5"}
)
NPM = Alias(parse_rule("tcp:10.0.0.6:443"), {"NPM_CONFIG_REGISTRY": "https://m"})
TABLE = AliasTable(
    "/etc/dsec/aliases.toml",
    services={"pypi": PYPI, "npm": NPM},
    public=Alias(parse_rule("udp:10.0.0.2:53")),
    never=(ip_network("10.9.0.0/16"), ip_network("9.0.0.0/8")),
)
NO_FILE = AliasTable("/etc/dsec/aliases.toml", missing="it cannot be read: No such file")


def reaches(rules: frozenset[Rule], protocol: Protocol, address: str, port: int) -> bool:
    """As the kernel decides."""
    peer = ip_address(address)
    flow = Flow(0, protocol, b"", peer, peer, port)
    return is_allowed(flow, [(r.protocol, r.network, r.port, r.allow) for r in rules])


def test_none_is_sealed_and_needs_no_file() -> None:
    assert compile_network(NetworkNone(), NO_FILE).mode is Mode.SEALED
    assert compile_network(NetworkNone(), NO_FILE).rules == frozenset()


def test_allow_without_arguments_allows_nothing() -> None:
    compiled = compile_network(NetworkAllow(), NO_FILE)
    assert compiled.mode is Mode.RULES
    assert compiled.rules == frozenset()


def test_allow_is_the_union_of_services_and_rules() -> None:
    network = NetworkAllow(services=("pypi", "npm", "pypi"), rules=("udp:10.0.0.7:53",))
    compiled = compile_network(network, TABLE)
    assert compiled.rules == {*PYPI.rules, *NPM.rules, *parse_rule("udp:10.0.0.7:53")}
    assert compiled.env == {**PYPI.env, **NPM.env}
    assert compiled.hosts == {"m": "10.0.0.5"}


def test_rules_alone_need_no_file() -> None:
    compiled = compile_network(NetworkAllow(rules=("tcp:10.0.0.7:80",)), NO_FILE)
    assert compiled.rules == set(parse_rule("tcp:10.0.0.7:80"))


def refusal(network: NetworkAllow | NetworkPublic, table: AliasTable = TABLE) -> DSecError:
    with pytest.raises(DSecError) as caught:
        compile_network(network, table)
    return caught.value


def test_unknown_alias_names_itself_the_file_and_how_to_add_it() -> None:
    err = refusal(NetworkAllow(services=("crates",)))
    assert isinstance(err, NotFound)
    assert "'crates'" in err.message
    assert "npm, pypi" in err.message
    assert TABLE.path in err.message
    assert "[services.crates]" in err.hint


@pytest.mark.parametrize("network", [NetworkAllow(services=("pypi",)), NetworkPublic()])
def test_missing_file_is_a_refusal_that_names_it(network: NetworkAllow | NetworkPublic) -> None:
    err = refusal(network, NO_FILE)
    assert isinstance(err, Unsupported)
    assert NO_FILE.path in err.message
    assert "No such file" in err.message
    assert NO_FILE.path in err.hint


def test_rule_into_what_the_operator_keeps_back_is_refused() -> None:
    for text in ("tcp:10.9.1.2:80", "tcp:10.0.0.0/8:80", "udp:0.0.0.0/0:*"):
        err = refusal(NetworkAllow(rules=(text,)))
        assert isinstance(err, PermissionDenied)
        assert text in err.message
    assert compile_network(NetworkAllow(rules=("tcp:10.8.0.0/16:80",)), TABLE).rules


def test_services_that_disagree_are_refused() -> None:
    other = Alias(env={"PIP_INDEX_URL": "https://other"})
    table = AliasTable(TABLE.path, services={"pypi": PYPI, "mirror": other})
    err = refusal(NetworkAllow(services=("pypi", "mirror")), table)
    assert isinstance(err, InvalidArgument)
    assert "'pypi' and 'mirror' disagree" in err.message


def test_too_many_rules_are_refused_with_their_number() -> None:
    ranges = tuple(f"tcp:10.0.{i}.1:1-256" for i in range(17))
    err = refusal(NetworkAllow(rules=ranges))
    assert isinstance(err, InvalidArgument)
    assert "4352 rules" in err.message
    assert str(MAX_RULES) in err.hint


def test_public_is_the_internet_and_nothing_of_ones_own() -> None:
    node = ip_address("198.51.0.7")
    rules = compile_network(NetworkPublic(), TABLE, lambda: [node]).rules
    for address in ("1.1.1.1", "198.51.0.8", "151.101.0.223", "2606:4700::1111"):
        for protocol in Protocol:
            assert reaches(rules, protocol, address, 443), address
    private = (
        "10.0.0.5", "172.16.0.1", "192.168.1.1", "127.0.0.1", "169.254.169.254", "100.64.0.9",
        "224.0.0.1", "255.255.255.255", "0.0.0.0", "fe80::1", "fd00::1", "::1", "2002:a00:1::",
        "64:ff9b::a00:1", "9.1.1.1", "198.51.0.7",
    )  # fmt: skip
    for address in private:
        for protocol in Protocol:
            assert not reaches(rules, protocol, address, 443), address
    assert reaches(rules, Protocol.UDP, "10.0.0.2", 53), "the operator's resolver"
    assert not reaches(rules, Protocol.TCP, "10.0.0.2", 53)


def test_public_is_the_same_whatever_sandboxes_the_node_has() -> None:
    here = [ip_address(a) for a in ("fe80::1", "169.254.77.1", "100.64.0.1", "10.0.0.1")]
    alone = compile_network(NetworkPublic(), TABLE)
    assert compile_network(NetworkPublic(), TABLE, lambda: here) == alone


def test_operator_may_open_a_reserved_network_to_public_but_not_what_is_kept_back() -> None:
    public = Alias(parse_rule("tcp:10.0.0.0/8:*") + parse_rule("tcp:10.9.0.0/16:*"))
    table = AliasTable(TABLE.path, public=public, never=TABLE.never)
    rules = compile_network(NetworkPublic(), table).rules
    assert Rule(Protocol.TCP, ip_network("10.0.0.0/8"), allow=False) not in rules, (
        "one key has one verdict"
    )
    assert Rule(Protocol.TCP, ip_network("10.9.0.0/16"), allow=False) in rules
    assert reaches(rules, Protocol.TCP, "10.0.0.9", 443)
    assert not reaches(rules, Protocol.UDP, "10.0.0.9", 443)
