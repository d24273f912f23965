"""The context file: which DSec a bare `DSecClient()` speaks to, and as whom.

`dsec up` writes one; an operator hands one to a user of a shared stack. It is TOML, every key is
optional, and paths in it are relative to the file:

    servers = ["nats://127.0.0.1:4222"]
    project = "default"
    user = "alice"
    password = "…"
    credentials = "alice.creds"     # instead of user and password
    ca = "ca.pem"                   # for tls:// servers

A *credentials file* is either the same TOML (usually with user and password only) or a NATS
`.creds` file. The file holds a password, so it is written for its owner alone.
"""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

from .errors import InvalidArgument

_NATS_CREDS = "-----BEGIN NATS USER JWT-----"


@dataclass(frozen=True)
class Context:
    """One level of configuration; None is "not said here"."""

    servers: tuple[str, ...] | None = None
    project: str | None = None
    user: str | None = None
    password: str | None = None
    credentials: Path | None = None
    ca: Path | None = None

    def over(self, other: Context) -> Context:
        """What this level says, and what `other` says where this one is silent.

        Who one is belongs together: a level that names a user or a credentials file takes neither
        a password nor a file from the level below.
        """
        below = other
        if self.user is not None or self.credentials is not None:
            below = replace(other, user=None, password=None, credentials=None)
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(below, **{name: value for name, value in said.items() if value is not None})

    def expanded(self) -> Context:
        """With the credentials file read, if it is one of ours; a NATS `.creds` stays a path.

        Raises:
            InvalidArgument: the file is missing, unreadable or neither of the two forms.
        """
        if self.credentials is None:
            return self
        text = _read(self.credentials, "credentials file")
        if text.lstrip().startswith(_NATS_CREDS):
            return self
        inside = parse_context(text, self.credentials)
        if inside.credentials is not None:
            raise InvalidArgument(
                f"credentials file {self.credentials} names another credentials file",
                hint="write user and password into it",
            )
        return replace(self, credentials=None).over(inside)

    def write(self, path: Path) -> None:
        """Replace `path` whole, readable by its owner alone."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.toml())
        temporary.replace(path)

    def toml(self) -> str:
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                # A TOML basic string has JSON's escapes.
                plain = list(value) if isinstance(value, tuple) else str(value)
                lines.append(f"{field.name} = {json.dumps(plain)}\n")
        return "".join(lines)


def read_context(path: Path) -> Context:
    """Read a context file.

    Raises:
        InvalidArgument: naming the file and what is wrong with it.
    """
    return parse_context(_read(path, "context file"), path)


def parse_context(text: str, path: Path) -> Context:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise InvalidArgument(f"{path} is not valid TOML: {err}") from err
    known = {field.name for field in fields(Context)}
    if unknown := sorted(set(data) - known):
        raise InvalidArgument(
            f"{path} has unknown keys: {', '.join(unknown)}",
            hint=f"it may say {', '.join(sorted(known))}",
        )
    servers = data.pop("servers", None)
    if isinstance(servers, str):
        servers = [servers]
    if servers is not None and not (
        isinstance(servers, list) and servers and all(isinstance(s, str) for s in servers)
    ):
        raise InvalidArgument(f"{path}: servers is a list of addresses")
    for name, value in data.items():
        if not isinstance(value, str) or not value:
            raise InvalidArgument(f"{path}: {name} is a string")

    def beside(name: str) -> Path | None:
        return path.parent / Path(data[name]).expanduser() if name in data else None

    return Context(
        servers=tuple(servers) if servers else None,
        project=data.get("project"),
        user=data.get("user"),
        password=data.get("password"),
        credentials=beside("credentials"),
        ca=beside("ca"),
    )


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as err:
        raise InvalidArgument(f"{what} {path} cannot be read: {err}") from err
