"""Everything a stack's processes read, written before they start. Safe to repeat."""

from __future__ import annotations

from libdsec.context import Context

from .description import StackDescription
from .files import write_private
from .layout import StackPaths
from .nats_config import hub_config, leaf_config
from .plan import Principals, principals
from .users import Role, User, load_users

ALIASES = """\
# Names for what sandboxes may reach: Network.allow(services=["pypi"]) means the rules below.
# The policy services read this file again when it changes; a broken file changes nothing.
#
# [services.pypi]
# rules = ["tcp:10.0.0.5:443"]
# env = { PIP_INDEX_URL = "https://mirror.example/simple" }
# hosts = { "mirror.example" = "10.0.0.5" }
"""


def configure(paths: StackPaths, description: StackDescription) -> Principals:
    """Write users, aliases, the bus's configuration and the contexts; returns who may connect."""
    paths.make()
    everybody = principals(paths, description, load_users(paths.users))
    if not paths.aliases.exists():
        write_private(paths.aliases, ALIASES)
    _bus(paths, description, everybody)
    for user in everybody.people:
        target = paths.context if user.name == "default" else paths.home / f"{user.name}.toml"
        context_of(user, description).write(target)
    return everybody


def context_of(user: User, description: StackDescription) -> Context:
    """What a client of this stack needs to know to be `user`."""
    return Context(
        servers=(f"nats://127.0.0.1:{description.hub_port}",),
        project=user.project,
        user=user.name,
        password=user.password,
    )


def operator_of(everybody: Principals) -> User | None:
    return next((u for u in everybody.people if u.role is Role.OPERATOR), None)


def _bus(paths: StackPaths, description: StackDescription, everybody: Principals) -> None:
    write_private(
        paths.nats / "hub.conf",
        hub_config(
            everybody.at_hub,
            port=description.hub_port,
            leaf_port=description.leaf_port,
            http_port=description.hub_http_port,
            store=paths.nats / "jetstream",
        ),
    )
    for node in description.nodes:
        write_private(
            paths.nats / f"leaf-{node.name}.conf",
            leaf_config(
                everybody.leaves[node.name],
                everybody.node_services[node.name],
                port=node.nats_port,
                leaf_port=description.leaf_port,
                http_port=node.nats_http_port,
            ),
        )
