"""The arguments of `run_container`, under the names of the system that DSec follows."""

from __future__ import annotations

from pydantic import Field

from .policy import Network, Policy, UserInput
from .wire import defaults as d


class DSecContainerRunArgs(UserInput):
    """One container, described in a few fields; `DSecClient.create` says everything.

    Attributes:
        container_image: the base layer, name@version.
        memory_limit_mb, cpu_cores_limit: hard limits.
        ttl_running_stop: seconds of idleness after which a running sandbox is stopped.
        network_rules: service alias → reachable; whatever is not listed as True is refused.
        init_user: who commands run as unless they say otherwise; None: the image's user.
    """

    container_image: str
    memory_limit_mb: int = d.MEMORY_MIB
    cpu_cores_limit: float = d.CPUS
    ttl_running_stop: float = d.IDLE_TIMEOUT_S
    network_rules: dict[str, bool] = Field(default_factory=dict)
    init_user: str | None = None

    def policy(self) -> Policy:
        allowed = sorted(name for name, reachable in self.network_rules.items() if reachable)
        return Policy(network=Network.allow(services=allowed) if allowed else Network.none())
