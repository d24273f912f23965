"""A node: what it can do, how it is, and the coarse view made of that."""

from __future__ import annotations

from enum import StrEnum

from .model import Message


class NodeState(StrEnum):
    LIVE = "live"
    SUSPECT = "suspect"
    LOST = "lost"


class Load(Message):
    """Each term as a share of the node's operating point; the node's load is their maximum."""

    memory: float = 0.0
    ls_cpu: float = 0.0
    creating: float = 0.0
    sandboxes: float = 0.0

    @property
    def value(self) -> float:
        return max(self.memory, self.ls_cpu, self.creating, self.sandboxes)


class Heartbeat(Message):
    """At most 1 KiB: counters and epochs, never lists of sandboxes."""

    node: str
    incarnation: str
    session: str  # of the edge process: new at every start
    seq: int
    backends: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()  # publish, egress, disk=loop, protected_paths, ...
    arch: str = "x86_64"
    pool: str = "local"
    cordoned: bool = False
    draining: bool = False
    policy_ready: bool = False
    snapshotter_ready: bool = False
    running: int = 0
    paused: int = 0
    creating: int = 0
    max_sandboxes: int = 0  # the operating point; 0: not stated
    max_creating: int = 0
    memory_mib: int = 0  # what one sandbox could be given at most
    cpus: float = 0.0
    disk_mib: int = 0
    free_memory_mib: int = 0
    free_disk_mib: int = 0
    load: Load = Load()
    layers_epoch: int = 0


class HeartbeatAck(Message):
    """A watcher has seen this heartbeat; the node may announce until LEASE_S after it sent it."""

    node: str
    session: str
    seq: int


class NodeView(Message):
    """A node as the cluster sees it. `age_s` is by the reader's monotonic clock."""

    heartbeat: Heartbeat
    state: NodeState
    age_s: float = 0.0


class NodeListing(Message):
    nodes: tuple[NodeView, ...] = ()
    lost_frozen: bool = False


class NodeCommand(Message):
    """cordon, uncordon, drain."""

    node: str
    by: str = ""


class NodeCapabilities(Message):
    """The full probe of a node: name → (value, why)."""

    node: str
    facts: dict[str, str] = {}
    reasons: dict[str, str] = {}
