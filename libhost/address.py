"""The addresses of this host's own interfaces."""

from __future__ import annotations

from ipaddress import ip_address

from pyroute2 import IPRoute

from libhost.bpf.rule import Address


def own_addresses() -> frozenset[Address]:
    """Those of the calling thread's network namespace, as they are now."""
    with IPRoute() as route:
        return frozenset(ip_address(entry.get("IFA_ADDRESS")) for entry in route.get_addr())
