"""The node's private mount namespace: made once, pinned, joined by every successor.

The edge mounts layers where no other process of the host sees them. The namespace is kept alive
by a bind of its nsfs file at ``<run>/ns/mnt``, so that the mounts outlive an edge that is killed
and the next one shares their page cache instead of mounting a second copy.
"""

from __future__ import annotations

from libhost.paths import NodePaths


def enter_node_namespace(paths: NodePaths) -> None:
    """Move this process into the node's mount namespace, creating and pinning it if need be.

    Call it first thing in ``__main__``: the kernel moves only a process of one thread, and what
    was opened before keeps pointing at the old namespace. Idempotent.
    """
    raise NotImplementedError


def remove_node_namespace(paths: NodePaths) -> None:
    """Drop the pin: the namespace and every layer mount in it go with their last user.

    Called from outside the namespace, by ``dsec down`` and by tests.
    """
    raise NotImplementedError
