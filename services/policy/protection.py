"""Which of a node's mechanisms keep `protected_paths` out of a sandbox's reach, if any.

A path is protected only where the node saw a mechanism enforce it. There is none yet: AppArmor
profiles and BPF-LSM need a kernel with either, and a mask mount has to be in place before the first
process. Until one is, a policy that asks for it is refused, never trimmed.
"""

from __future__ import annotations

from libdsec.errors import Unsupported
from libhost import apparmor


def refuse_protected_paths(node: str, paths: tuple[str, ...]) -> None:
    """Raises Unsupported if there is anything to protect."""
    if not paths:
        return
    why = (
        "no profile for its AppArmor is there yet"
        if apparmor.is_enabled()
        else "its kernel has no AppArmor, and nothing else here can do it"
    )
    raise Unsupported(
        f"node {node} cannot protect {', '.join(paths[:3])} from the sandbox: {why}",
        hint="bring such files in with a layer of the phase that needs them",
    )
