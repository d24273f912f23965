"""The bus's configuration, rendered from the list of users: what each may say and hear.

Pure. The hub holds JetStream and every principal; each node has a leaf server whose credential at
the hub speaks for that node only, so that a broken node cannot heartbeat, answer or announce for
another. The leaf has no JetStream: its services reach the hub's through the domain `hub`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from libdsec.wire import subjects

from .users import Role, User

DOMAIN = "hub"
_MAX_PAYLOAD = 1 << 20
_STORE_LIMITS = "max_memory_store: 268435456, max_file_store: 17179869184"


def hub_config(
    users: Sequence[User], *, port: int, leaf_port: int, http_port: int, store: Path
) -> str:
    """The hub's nats-server configuration."""
    return "\n".join(
        [
            "server_name: dsec-hub",
            f"listen: 127.0.0.1:{port}",
            f"http: 127.0.0.1:{http_port}",
            f"max_payload: {_MAX_PAYLOAD}",
            f'jetstream {{ domain: {DOMAIN}, store_dir: "{store}", {_STORE_LIMITS} }}',
            f"leafnodes {{ listen: 127.0.0.1:{leaf_port} }}",
            "accounts { DSEC { jetstream: enabled, users: [",
            *(_user(user) for user in users),
            "] } }",
            "",
        ]
    )


def leaf_config(
    node: User, users: Sequence[User], *, port: int, leaf_port: int, http_port: int
) -> str:
    """A node's leaf: local services stay local, and keep working when the hub is away."""
    url = json.dumps(f"nats-leaf://{node.name}:{node.password}@127.0.0.1:{leaf_port}")
    return "\n".join(
        [
            f"server_name: dsec-leaf-{node.node}",
            f"listen: 127.0.0.1:{port}",
            f"http: 127.0.0.1:{http_port}",
            f"max_payload: {_MAX_PAYLOAD}",
            f"leafnodes {{ reconnect: 1s, remotes: [ {{ url: {url}, account: NODE }} ] }}",
            "accounts { NODE { users: [",
            *(f"  {{ user: {u.name}, password: {json.dumps(u.password)} }}" for u in users),
            "] } }",
            # The services of a node say $JS.API; the leaf sends that to the hub's domain.
            f"default_js_domain: {{ NODE: {DOMAIN} }}",
            "",
        ]
    )


def _user(user: User) -> str:
    publish, subscribe = (json.dumps(rule) for rule in permissions(user))
    rules = f"publish: {{ allow: {publish} }}, subscribe: {{ allow: {subscribe} }}"
    name_and_password = f"user: {user.name}, password: {json.dumps(user.password)}"
    return f"  {{ {name_and_password}, permissions: {{ {rules} }} }}"


def permissions(user: User) -> tuple[list[str], list[str]]:
    """Subjects a principal may publish to, and subscribe to."""
    inbox = f"{user.inbox_prefix}.>"
    match user.role:
        case Role.CALLER:
            return [f"dsec.v1.p.{user.project}.>"], [inbox]
        case Role.OPERATOR:
            # An operator may act for any project, and then has an inbox in that project's name.
            anywhere = f"_INBOX.*.{user.name}.>"
            return ["dsec.v1.p.>", "dsec.v1.ops.>", "$SRV.>", "$JS.API.>"], [anywhere, "dsec.v1.>"]
        case Role.SERVICE:
            everything = ["dsec.v1.>", "$JS.>", "$KV.>", "$SRV.>", "_INBOX.>"]
            return everything, [inbox, "dsec.v1.>", "$KV.>", "$SRV.>", "$JS.EVENT.>"]
        case Role.NODE:
            return _node_publish(user.node), _node_subscribe(user.node)
        case Role.NODE_SERVICE:
            return [">"], [">"]  # within the leaf; the leaf's own credential bounds it outside


def _node_publish(node: str) -> list[str]:
    streams = [f"KV_{bucket.name}" for bucket in subjects.BUCKETS] + [
        s.name for s in subjects.STREAMS
    ]
    api = f"$JS.{DOMAIN}.API"
    return [
        f"dsec.v1.node.{node}.>",
        "dsec.v1.dlq.>",
        "dsec.v1.burst.>",
        "_INBOX.>",  # replies; what they carry is matched by its nonce
        *(f"{api}.STREAM.INFO.{stream}" for stream in streams),
        *(f"{api}.DIRECT.GET.{stream}.>" for stream in streams),
        *(f"{api}.DIRECT.GET.{stream}" for stream in streams),
        *(f"{api}.CONSUMER.*.KV_{bucket.name}.>" for bucket in subjects.BUCKETS),
        *(f"{api}.CONSUMER.MSG.NEXT.KV_{bucket.name}.>" for bucket in subjects.BUCKETS),
        # An edge that publishes layers claims their names; everything else it only reads.
        f"{api}.$KV.{subjects.LAYERS.name}.>",
        f"$KV.{subjects.LAYERS.name}.>",
        "$JS.FC.>",
    ]


def _node_subscribe(node: str) -> list[str]:
    return [
        f"dsec.v1.node.{node}.>",
        "dsec.v1.nodes.>",
        f"dsec.v1.p.*.edge.{node}.>",
        "dsec.v1.p.*.edges.>",
        "dsec.v1.p.*.layers.>",
        "dsec.v1.p.*.trace",
        "dsec.v1.ops.>",
        f"_INBOX.node.{node}.>",
        "$SRV.>",
    ]
