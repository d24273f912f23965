"""Composition of a node's edge."""

from __future__ import annotations

import contextlib
import sys

from pydantic import ValidationError
from pydantic_settings import SettingsError

from libhost.enter import enter_node_namespace
from libhost.errors import HostError

from ..chassis.run import run
from .assembly import EdgeService, build_node, lay_ground, meet_peers, node_paths
from .edge import Edge
from .settings import EdgeSettings

COULD_NOT_START = 3


async def setup(service: EdgeService) -> None:
    """Returns when the edge serves."""
    ground = await lay_ground(service)
    policy, snapshotter = await meet_peers(service)
    node = await build_node(service, ground, policy, snapshotter)
    edge = Edge.build(service, ground, node)
    await edge.take_over()
    await edge.serve()


def main() -> None:
    """The mount namespace is entered first: the kernel moves only a process of one thread."""
    with contextlib.suppress(ValidationError, SettingsError):  # `run` tells what is wrong
        settings = EdgeSettings()
        if len(sys.argv) == 1:  # not for --print-config and the like
            try:
                enter_node_namespace(node_paths(settings))
            except (OSError, HostError) as err:
                print(f"an edge needs root and mount namespaces: {err}", file=sys.stderr)  # noqa: T201
                sys.exit(COULD_NOT_START)
    run("edge", EdgeSettings, setup, speaks_for_node=True)


if __name__ == "__main__":
    main()
