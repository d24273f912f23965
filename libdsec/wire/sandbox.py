"""What a sandbox is asked to be, and what is told about one."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from . import defaults as d
from .model import Message


class Backend(StrEnum):
    CONTAINER = "container"
    MICROVM = "microvm"
    VM = "vm"


class Qos(StrEnum):
    BEST_EFFORT = "best-effort"
    LATENCY_SENSITIVE = "latency-sensitive"

    @property
    def lane(self) -> str:
        """The subject token and cgroup name of the class."""
        return "be" if self is Qos.BEST_EFFORT else "ls"


class State(StrEnum):
    """A sandbox's states; `dead` is final."""

    ACCEPTED = "accepted"  # on an edge's disk, fsynced
    STARTED = "started"  # its first process runs
    READY = "ready"  # announced to its owner
    PAUSED = "paused"
    DEAD = "dead"


class NetworkNone(Message):
    """Loopback only."""

    mode: Literal["none"] = "none"


class NetworkAllow(Message):
    """Only what is listed; everything else is refused."""

    mode: Literal["allow"] = "allow"
    services: tuple[str, ...] = ()  # aliases of the operator's file
    rules: tuple[str, ...] = ()  # "tcp:10.0.0.5:443", "udp:10.0.0.0/8:53"


class NetworkPublic(Message):
    """Everything but the operator's own networks."""

    mode: Literal["public"] = "public"


NetworkSpec = Annotated[NetworkNone | NetworkAllow | NetworkPublic, Field(discriminator="mode")]


class PolicySpec(Message):
    network: NetworkSpec = NetworkNone()
    protected_paths: tuple[str, ...] = ()


class Resources(Message):
    cpus: float = d.CPUS
    memory_mib: int = d.MEMORY_MIB
    disk_mib: int = d.DISK_MIB
    max_files: int = d.MAX_FILES
    shm_mib: int = d.SHM_MIB
    pids: int = d.PIDS


class Lifetime(Message):
    idle_timeout_s: float = d.IDLE_TIMEOUT_S
    max_lifetime_s: float = d.MAX_LIFETIME_S
    max_paused_s: float = d.MAX_PAUSED_S


class SandboxSpec(Message):
    """Everything a caller chose; `policy` applies at create, `phases` are what it may become."""

    backend: Backend = Backend.CONTAINER
    image: str
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    resources: Resources = Resources()
    qos: Qos = Qos.BEST_EFFORT
    policy: PolicySpec = PolicySpec()
    phases: dict[str, PolicySpec] = {}
    phase: str | None = None
    user: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    labels: dict[str, str] = {}
    lifetime: Lifetime = Lifetime()


class SandboxInfo(Message):
    """A sandbox as its edge sees it. Times are seconds since the epoch on the edge's clock."""

    sandbox_id: str
    node: str
    backend: Backend
    state: State
    labels: dict[str, str] = {}
    image: str = ""
    generation: int = 0  # of the policy in force
    epoch: int = 0  # restores so far
    created_at: float = 0.0
    idle_expires_at: float | None = None
    expires_at: float | None = None
    paused_expires_at: float | None = None
    phase: str | None = None
    request_id: str = ""
    death: str | None = None  # a DeathReason when state is dead
    phases_ms: dict[str, float] = {}  # of the create


class SandboxMetrics(Message):
    cpu_usage_s: float
    memory_bytes: int
    memory_limit_bytes: int
    swap_bytes: int
    disk_bytes: int
    disk_limit_bytes: int
    processes: int
    oom_kills: int


class ById(Message):
    """A request that names one sandbox."""

    sandbox_id: str


class PauseSandbox(ById):
    reclaim: bool = True


class PauseResult(Message):
    """What a pause brought."""

    state: State
    frozen_ms: float
    reclaimed_bytes: int
    resident_bytes: int


class ResumeResult(Message):
    state: State
    paused_s: float
    thaw_ms: float


class ExtendSandbox(ById):
    idle_timeout_s: float | None = None
    max_lifetime_s: float | None = None


class SetNetwork(ById):
    network: NetworkSpec


class SetPhase(ById):
    name: str


class PolicyApplied(Message):
    generation: int


class StopSandbox(ById):
    reason: str = "stopped"


class Selection(Message):
    """Sandboxes of the subject's project whose labels contain all of these."""

    labels: dict[str, str] = {}
    limit: int = 10_000
    dry_run: bool = False


class Listing(Message):
    node: str
    sandboxes: tuple[SandboxInfo, ...] = ()
    dropped: int = 0  # not listed because of `limit` or the size of a message


class ManyOutcome(Message):
    """What a *_many verb did on one node: ids done, and the error of each that failed."""

    node: str
    done: tuple[str, ...] = ()
    failed: dict[str, str] = {}
    dropped: int = 0


class Denial(Message):
    """One thing that was refused, counted."""

    at: float
    kind: str  # network | file
    process: str = ""
    target: str = ""  # "tcp 10.0.0.5:443" or a path
    rule: str = ""
    count: int = 1


class AuditLog(Message):
    denials: tuple[Denial, ...] = ()
    dropped: int = 0
