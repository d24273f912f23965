"""The static users file: who may connect to the bus, as what.

    [users.alice]
    role = "caller"          # caller | operator
    project = "team-a"
    password = "…"

`dsec up` makes the file on first use with one caller (project `default`) and one operator, and
the passwords of the services beside it. Adding a user is adding a table and running `dsec up`
again: the hub reloads its configuration without dropping connections.
"""

from __future__ import annotations

import secrets
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from libdsec.errors import InvalidArgument
from libdsec.wire.ids import check_project

from .files import write_private

_FILES = frozenset({"users", "aliases", "context"})  # of the home, beside the users' contexts


class Role(StrEnum):
    CALLER = "caller"  # speaks for one project
    OPERATOR = "operator"  # sees everything, commands nodes
    SERVICE = "service"  # trusted side: schedulers, burst
    NODE = "node"  # the leaf of one node
    NODE_SERVICE = "node-service"  # edge, policy, snapshotter, behind their leaf


@dataclass(frozen=True)
class User:
    name: str
    role: Role
    project: str
    password: str
    node: str = ""

    @property
    def inbox_prefix(self) -> str:
        """Nobody else may listen below it."""
        match self.role:
            case Role.CALLER | Role.OPERATOR:
                return f"_INBOX.{self.project}.{self.name}"
            case Role.SERVICE:
                return f"_INBOX.service.{self.name}"
            case Role.NODE | Role.NODE_SERVICE:
                return f"_INBOX.node.{self.node}.{self.name}"


def load_users(path: Path) -> tuple[User, ...]:
    """Read the callers and operators.

    Raises:
        InvalidArgument: naming the file, the user and the field that is wrong.
    """
    if not path.exists():
        write_private(path, _first_users())
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as err:
        raise InvalidArgument(f"{path} is not valid TOML: {err}") from err
    return tuple(_user(path, name, fields) for name, fields in data.get("users", {}).items())


def service_user(name: str, role: Role, secret: Path, node: str = "") -> User:
    """A service's own principal; its password is made once and kept in `secret`."""
    if not secret.exists():
        write_private(secret, secrets.token_urlsafe(24))
    return User(name, role, "dsec", secret.read_text().strip(), node)


def _user(path: Path, name: str, fields: object) -> User:
    where = f"{path}: [users.{name}]"
    check_project(name)
    if name in _FILES:
        raise InvalidArgument(
            f"{where}: its context would replace {name}.toml", hint="use another name"
        )
    if not isinstance(fields, dict):
        raise InvalidArgument(f"{where} is not a table")
    unknown = set(fields) - {"role", "project", "password"}
    if unknown:
        raise InvalidArgument(f"{where} has unknown fields: {', '.join(sorted(unknown))}")
    role = fields.get("role", "caller")
    if role not in (Role.CALLER, Role.OPERATOR):
        raise InvalidArgument(f"{where}: role {role!r} is neither caller nor operator")
    password = str(fields.get("password", ""))
    if len(password) < 8:
        raise InvalidArgument(f"{where}: the password has fewer than 8 characters")
    return User(name, Role(role), check_project(str(fields.get("project", "default"))), password)


def _first_users() -> str:
    return "\n".join(
        f'[users.{name}]\nrole = "{role}"\nproject = "default"\n'
        f'password = "{secrets.token_urlsafe(18)}"\n'
        for name, role in (("default", Role.CALLER), ("operator", Role.OPERATOR))
    )
