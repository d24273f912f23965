"""What a sandbox reaches: what its policy lists, nothing else, and refusals are on record."""

from __future__ import annotations

import pytest

from libdsec import DSecClient, Network, Policy, Sandbox
from libdsec.errors import Conflict, DSecError, InvalidArgument, NotFound, Unsupported
from tests.stack import IMAGE, SMALL, Stack

from .mirror import GATEWAY, Mirror


async def fetches(sandbox: Sandbox, port: int, host: str = GATEWAY) -> bool:
    """Whether a page comes, asked for by a program inside (Debian's static wget crashes)."""
    got = await sandbox.exec(f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 3 {host} {port}")
    assert got.exit_code == 0 or got.stdout == ""
    return "hello 100." in got.stdout  # its own address, as the server sees it


async def test_only_what_an_alias_stands_for_is_reached(client: DSecClient, mirror: Mirror) -> None:
    policy = Policy(network=Network.allow(services=["pypi"]))
    async with await client.create(image=IMAGE, **SMALL, policy=policy) as sandbox:
        assert await fetches(sandbox, mirror.allowed)
        assert await fetches(sandbox, mirror.allowed, "mirror.test")
        told = await sandbox.exec("echo $INDEX")
        assert told.stdout == f"http://{GATEWAY}:{mirror.allowed}/\n"
        assert not await fetches(sandbox, mirror.other)
        log = await sandbox.audit()
        [denial] = [d for d in log.denials if str(mirror.other) in d.target]
        assert denial.kind == "network"
        assert denial.process.startswith("nc[")
        assert GATEWAY in denial.target
        assert not [d for d in log.denials if str(mirror.allowed) in d.target]


async def test_default_is_nothing_and_the_host_is_out_of_reach(
    stack: Stack, client: DSecClient, mirror: Mirror
) -> None:
    async with await client.create(image=IMAGE, **SMALL) as sandbox:
        assert not await fetches(sandbox, mirror.allowed)
        assert (await sandbox.exec("ls /sys/class/net")).stdout.split() == ["lo"]
        hub = stack.description.hub_port
        assert not await fetches(sandbox, hub, "127.0.0.1")  # a loopback of its own


async def test_a_change_replaces_the_whole_rule_set(client: DSecClient, mirror: Mirror) -> None:
    rule = f"tcp:{GATEWAY}:{mirror.other}"
    policy = Policy(network=Network.allow(services=["pypi"]))
    async with await client.create(image=IMAGE, **SMALL, policy=policy) as sandbox:
        first = (await sandbox.info()).generation
        changed = await sandbox.set_network(Network.allow(rules=[rule]))
        assert changed > first
        assert await fetches(sandbox, mirror.other)
        assert not await fetches(sandbox, mirror.allowed)
        assert await sandbox.set_network() > changed  # left out means none
        assert not await fetches(sandbox, mirror.other)
        assert (await sandbox.info()).generation == changed + 1


async def test_phases_switch_by_name(client: DSecClient, mirror: Mirror) -> None:
    phases = {"setup": Policy(network=Network.allow(services=["pypi"])), "solve": Policy()}
    async with await client.create(image=IMAGE, **SMALL, phases=phases) as sandbox:
        assert await fetches(sandbox, mirror.allowed)
        await sandbox.set_phase("solve")
        assert not await fetches(sandbox, mirror.allowed)
        await sandbox.set_phase("setup")
        assert await fetches(sandbox, mirror.allowed)
        with pytest.raises((InvalidArgument, NotFound), match="score"):
            await sandbox.set_phase("score")


async def test_network_cannot_be_given_to_a_sandbox_without_a_link(
    client: DSecClient, mirror: Mirror
) -> None:
    """It is refused with its reason; it is never pretended to be in force."""
    async with await client.create(image=IMAGE, **SMALL) as sandbox:
        with pytest.raises((Unsupported, Conflict)) as told:
            await sandbox.set_network(Network.allow(services=["pypi"]))
        assert told.value.hint
        assert not await fetches(sandbox, mirror.allowed)


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (Network.allow(services=["no-such-alias"]), "no-such-alias"),
        (Network.allow(rules=["tcp:example.org:443"]), "example.org"),
        (Network.allow(rules=["icmp:10.0.0.1:1"]), "icmp:10.0.0.1:1"),
        (Network.allow(rules=["tcp:10.0.0.1:0"]), "tcp:10.0.0.1:0"),
    ],
)
async def test_a_rule_that_cannot_be_enforced_is_refused_by_name(
    stack: Stack, client: DSecClient, mirror: Mirror, network: object, names: str
) -> None:
    with pytest.raises(DSecError, match=names) as told:
        await client.create(
            image=IMAGE, **SMALL, policy=Policy(network=network), timeout=20
        )  # fmt: skip
    assert isinstance(told.value, InvalidArgument | NotFound | Unsupported)
    assert told.value.hint
    if "alias" in names:
        assert str(stack.paths.aliases) in str(told.value)
