"""Where a request may go when the local nodes are full."""

from __future__ import annotations

from .model import Message
from .sandbox import SandboxSpec


class BurstQuestion(Message):
    project: str
    spec: SandboxSpec
    digests: tuple[str, ...] = ()


class BurstAnswer(Message):
    """`pools` a scheduler may place in, and why."""

    pools: tuple[str, ...]
    eligible: bool
    utilisation: float
    bursting: bool
    reason: str


class BurstStatus(Message):
    utilisation: float
    bursting: bool
    enabled: bool
    synced_layers: int = 0
