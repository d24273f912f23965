"""What an operator may ask of a node: cordon, uncordon, drain, and what the host can do.

A drained node takes nothing new and its sandboxes end by themselves, within their own limits:
nothing here cuts a rollout short. It is empty when its heartbeat counts no sandbox any more.
"""

from __future__ import annotations

from dataclasses import fields

import structlog

from libdsec.bus import Call
from libdsec.errors import InvalidArgument
from libdsec.wire.model import Empty
from libdsec.wire.node import NodeCapabilities, NodeCommand
from libhost.probe import Finding, HostCapabilities

from .switches import Switches

_log = structlog.get_logger("edge.operators")


class Operators:
    """One method per subject."""

    def __init__(self, node: str, switches: Switches, capabilities: HostCapabilities) -> None:
        self._node = node
        self._switches = switches
        self._capabilities = capabilities

    async def cordon(self, command: NodeCommand, _call: Call) -> Empty:
        return await self._set(command, cordoned=True, draining=False)

    async def uncordon(self, command: NodeCommand, _call: Call) -> Empty:
        return await self._set(command, cordoned=False, draining=False)

    async def drain(self, command: NodeCommand, _call: Call) -> Empty:
        return await self._set(command, cordoned=True, draining=True)

    async def capabilities(self, _request: Empty, _call: Call) -> NodeCapabilities:
        facts, reasons = describe(self._capabilities)
        return NodeCapabilities(node=self._node, facts=facts, reasons=reasons)

    async def _set(self, command: NodeCommand, *, cordoned: bool, draining: bool) -> Empty:
        if command.node != self._node:
            raise InvalidArgument(f"this is node {self._node}, not {command.node}")
        await self._switches.set(cordoned=cordoned, draining=draining)
        _log.info("switched", by=command.by, cordoned=cordoned, draining=draining)
        return Empty()


def describe(capabilities: HostCapabilities) -> tuple[dict[str, str], dict[str, str]]:
    """The probe's findings as text: what is there, and why it is or is not. Pure."""
    facts: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for field in fields(capabilities):
        value = getattr(capabilities, field.name)
        if field.name.endswith("_reason"):
            reasons[field.name.removesuffix("_reason")] = value
        elif isinstance(value, Finding):
            facts[field.name] = "yes" if value.ok else "no"
            reasons[field.name] = value.reason
        else:
            facts[field.name] = "no" if value is None else str(value)
    return facts, {name: why for name, why in reasons.items() if why}
