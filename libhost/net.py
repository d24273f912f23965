"""A sandbox's way to the network: a veth pair, one address, one gateway, nothing else.

The sandbox has ``eth0`` with a /32 and a default route to a link-local gateway that the node
holds on a device of its own; both ends know the other's MAC by a permanent neighbour entry, so no
ARP is needed. No IPv6 on the pair. Host-wide settings are never changed: whether the host forwards
beyond itself is the operator's decision.

Links are prepared ahead, down on the host side. The order for the caller is
``take`` -> attach the policy to ``link.ifindex`` -> ``open_gate`` -> start the process.
A network namespace is held by descriptor only: when its last process and descriptor are gone the
kernel removes it with both ends of the pair.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from libhost import netns
from libhost.paths import SLOT_PATTERN, NodePaths, SandboxPaths

GATEWAY = IPv4Address("169.254.77.1")
_CONF = Path("/proc/sys/net")
_NUD_PERMANENT = 0x80
_SCOPE_LINK = 253
_POOL_PREFIX = "dsp"
_VANISH_S = 1.0
_VANISH_POLL_S = 0.01


@dataclass
class Link:
    """take -> open_gate -> (container started) close_namespace -> remove.

    ``namespace_fd`` is -1 once it is closed, and from the start for a link that was found.
    """

    interface: str
    ifindex: int
    address: IPv4Address
    namespace_fd: int

    def close_namespace(self) -> None:
        """Give up the descriptor once a process lives in the namespace; idempotent."""
        fd, self.namespace_fd = self.namespace_fd, -1
        if fd >= 0:
            os.close(fd)


class NodeNetwork:
    """The links of one node; ``addresses`` is the node's own range, disjoint from any other's.

    Any thread may call any method.
    """

    def __init__(
        self,
        paths: NodePaths,
        addresses: IPv4Network,
        *,
        gateway: IPv4Address = GATEWAY,
        pool_size: int = 8,
    ) -> None:
        self._paths = paths
        self._addresses = addresses
        self._gateway = gateway
        self._pool_size = pool_size
        self._pool: deque[Link] = deque()
        self._lock = threading.Lock()
        self._cursor = 0
        self._held: dict[str, IPv4Address] = {}  # by interface name, prepared ones included

    def ensure(self) -> None:
        """Create the gateway device, read which addresses live sandboxes hold; idempotent."""
        name = self._paths.gateway_interface
        with _netlink() as ip:
            if not ip.link_lookup(ifname=name):
                ip.link("add", ifname=name, kind="veth", peer={"ifname": f"{name[:-1]}_"})
            for end in (name, f"{name[:-1]}_"):
                _set(f"ipv6/conf/{end}/disable_ipv6", "1")
                alias = self._paths.cgroup_name
                ip.link("set", index=_index(ip, end), state="up", ifalias=alias)
            ip.addr("replace", index=_index(ip, name), address=str(self._gateway), prefixlen=32)
            names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in ip.get_links()}
            routes = {names[oif]: address for oif, address in self._routes(ip) if oif in names}
        with self._lock:
            self._held = routes | {link.interface: link.address for link in self._pool}

    def refill(self) -> int:
        """Prepare links up to the pool's size; returns how many it made."""
        made = 0
        while len(self._pool) < self._pool_size:
            self._pool.append(self._prepare())
            made += 1
        return made

    def take(self, sandbox: SandboxPaths) -> Link:
        """A link named for the sandbox, host end still down. OSError EADDRNOTAVAIL: range full."""
        try:
            prepared = self._pool.popleft()
        except IndexError:
            prepared = self._prepare()
        with _netlink() as ip:
            ip.link("set", index=prepared.ifindex, ifname=sandbox.interface)
        with self._lock:
            self._held[sandbox.interface] = self._held.pop(prepared.interface)
        return dataclasses.replace(prepared, interface=sandbox.interface)

    def open_gate(self, link: Link) -> None:
        """Bring the host end up and route the address to it. The policy must be attached."""
        index, address = link.ifindex, str(link.address)
        # Strict: a packet from any address but the routed one is dropped.
        _set(f"ipv4/conf/{link.interface}/rp_filter", "1")
        mac = _mac(link.address, inside=True)
        with _netlink() as ip:
            ip.link("set", index=index, state="up")
            ip.neigh("add", dst=address, lladdr=mac, ifindex=index, state=_NUD_PERMANENT)
            ip.route("add", dst=f"{address}/32", oif=index, scope=_SCOPE_LINK)

    def find(self, sandbox: SandboxPaths) -> Link | None:
        """The link of a running sandbox (``namespace_fd`` is -1), for a successor."""
        address = self._held.get(sandbox.interface)
        with _netlink() as ip:
            found = ip.link_lookup(ifname=sandbox.interface)
        if address is None or not found:
            return None
        return Link(sandbox.interface, int(found[0]), address, -1)

    def remove(self, sandbox: SandboxPaths) -> None:
        """See the link gone, with its processes and descriptors ended, and free the address.

        The kernel takes dying namespaces down in batches; a delete of ours would hold the lock
        that every change of every interface needs for some 15 ms, so it is the last resort.
        Idempotent.
        """
        deadline = time.monotonic() + _VANISH_S
        with _netlink() as ip:
            while ip.link_lookup(ifname=sandbox.interface):
                if time.monotonic() > deadline:
                    self._delete(sandbox.interface)
                    break
                time.sleep(_VANISH_POLL_S)
        with self._lock:
            self._held.pop(sandbox.interface, None)

    def interfaces(self) -> dict[str, int]:
        """Slot -> ifindex of every interface made for a sandbox of this node."""
        with _netlink() as ip:
            return {
                name[2:]: link["index"]
                for link in ip.get_links()
                if (name := link.get_attr("IFLA_IFNAME")).startswith("ds")
                and SLOT_PATTERN.fullmatch(name[2:])
                and link.get_attr("IFLA_IFALIAS") == self._paths.cgroup_name
            }

    def close(self) -> None:
        """Drop the prepared links."""
        with contextlib.suppress(IndexError):
            while link := self._pool.popleft():
                link.close_namespace()
                with self._lock:
                    self._held.pop(link.interface, None)

    def remove_gateway(self) -> None:
        """Delete the gateway device, for ``dsec down``; idempotent."""
        self._delete(self._paths.gateway_interface)

    def _prepare(self) -> Link:
        name = f"{_POOL_PREFIX}{secrets.token_hex(4)}"
        address = self._allocate(name)
        host = netns.open_current()
        try:
            fd, _ = netns.create_with(lambda: self._furnish(name, address, host))
        except BaseException:
            with self._lock:
                self._held.pop(name, None)
            raise
        finally:
            os.close(host)
        with _netlink() as ip:
            index = _index(ip, name)
            ip.link("set", index=index, ifalias=self._paths.cgroup_name)
            return Link(name, index, address, fd)

    def _furnish(self, host_end: str, address: IPv4Address, host_namespace: int) -> None:
        """Inside the new namespace: the pair with one end in the host's, addresses, routes."""
        # Before eth0 exists; lo keeps its ::1, which programs bind to.
        _set("ipv6/conf/default/disable_ipv6", "1")
        host_mac, mac = _mac(address, inside=False), _mac(address, inside=True)
        peer = {"ifname": host_end, "net_ns_fd": host_namespace, "address": host_mac}
        gateway = str(self._gateway)
        with _netlink() as ip:
            ip.link("add", ifname="eth0", kind="veth", address=mac, peer=peer)
            eth0 = _index(ip, "eth0")
            for index in (1, eth0):
                ip.link("set", index=index, state="up")
            ip.addr("add", index=eth0, address=str(address), prefixlen=32)
            ip.neigh("add", dst=gateway, lladdr=host_mac, ifindex=eth0, state=_NUD_PERMANENT)
            ip.route("add", dst=f"{gateway}/32", oif=eth0, scope=_SCOPE_LINK)
            ip.route("add", dst="0.0.0.0/0", gateway=gateway, oif=eth0)

    def _allocate(self, interface: str) -> IPv4Address:
        """The next free address, going round: a freed one is not given out again at once."""
        size = self._addresses.num_addresses
        with self._lock:
            taken = set(self._held.values())
            for _ in range(size):
                self._cursor = (self._cursor + 1) % size
                address = self._addresses[self._cursor]
                # The first and the last are left alone: some tools treat them as special.
                if 0 < self._cursor < size - 1 and address not in taken:
                    self._held[interface] = address
                    return address
        raise OSError(errno.EADDRNOTAVAIL, "every address of the node's range is in use")

    def _routes(self, ip: IPRoute) -> Iterator[tuple[int, IPv4Address]]:
        """(interface index, address) of every sandbox route in this node's range."""
        for route in ip.get_routes(family=2, table=254):
            dst, oif = route.get_attr("RTA_DST"), route.get_attr("RTA_OIF")
            if route["dst_len"] == 32 and dst and IPv4Address(dst) in self._addresses:
                yield oif, IPv4Address(dst)

    def _delete(self, interface: str) -> None:
        with _netlink() as ip:
            for index in ip.link_lookup(ifname=interface):
                try:
                    ip.link("del", index=index)
                except NetlinkError as err:
                    if err.code != errno.ENODEV:  # else it went with its namespace meanwhile
                        raise


@contextlib.contextmanager
def _netlink() -> Iterator[IPRoute]:
    """What the kernel refuses leaves as an OSError, as everywhere in this package."""
    try:
        with IPRoute() as ip:
            yield ip
    except NetlinkError as err:
        raise OSError(err.code, os.strerror(err.code)) from err


def _index(ip: IPRoute, name: str) -> int:
    return int(ip.link_lookup(ifname=name)[0])


def _mac(address: IPv4Address, *, inside: bool) -> str:
    """Locally administered and derived, so that both ends can know it beforehand."""
    prefix = "0a:58" if inside else "0e:58"
    return ":".join([prefix, *(f"{byte:02x}" for byte in address.packed)])


def _set(name: str, value: str) -> None:
    """A setting of an interface of ours, in the calling thread's namespace."""
    (_CONF / name).write_text(value)
