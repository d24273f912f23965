"""Between an edge and the policy service of its node."""

from __future__ import annotations

from .model import Message
from .sandbox import Denial, PolicySpec


class ApplyPolicy(Message):
    """Put this policy in force for a sandbox, wholly, as `generation`. Idempotent."""

    sandbox_id: str
    generation: int
    policy: PolicySpec
    cgroup_id: int
    ifindex: int | None = None  # of the host end of its veth
    address: str | None = None  # its own, for the anti-spoofing check
    netns_path: str | None = None  # so that flows which are no longer allowed can be ended


class PolicyInForce(Message):
    generation: int
    env: dict[str, str] = {}  # what the operator's aliases add to the sandbox
    hosts: dict[str, str] = {}


class CheckPolicy(Message):
    """Could this policy be put in force here? Answers with an error when not."""

    policy: PolicySpec


class RemovePolicy(Message):
    sandbox_id: str


class PolicyAudit(Message):
    sandbox_id: str
    denials: tuple[Denial, ...] = ()
    dropped: int = 0


class AuditPolicy(Message):
    sandbox_id: str


class ReconcilePolicy(Message):
    """Remove what belongs to no sandbox of this list."""

    sandbox_ids: tuple[str, ...]


class Reconciled(Message):
    removed: int
    missing: tuple[str, ...] = ()  # listed, but no policy is in force for them: apply it again


class PolicyHealth(Message):
    """Sent every second to the node's edge."""

    ready: bool
    reason: str = ""
    mechanisms: tuple[str, ...] = ()
