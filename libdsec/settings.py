"""How a client is configured: arguments, then DSEC_* variables, then the context file.

The only file of the client that reads the environment.

    DSEC_CONTEXT        the context file; default ~/.config/dsec/context.toml
    DSEC_SERVERS        addresses, separated by commas
    DSEC_PROJECT
    DSEC_USER, DSEC_PASSWORD (or DSEC_PASSWORD_FILE)
    DSEC_CREDENTIALS    a credentials file instead of both
    DSEC_CA             the certificate authority of tls:// servers
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .context import Context, read_context
from .errors import InvalidArgument, Unavailable
from .wire.ids import check_project

DEFAULT_PROJECT = "default"


def default_context_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where `dsec up` writes and a bare `DSecClient()` reads."""
    environ = os.environ if environ is None else environ
    named = environ.get("DSEC_CONTEXT")
    return Path(named) if named else Path.home() / ".config" / "dsec" / "context.toml"


@dataclass(frozen=True)
class ClientSettings:
    """Where DSec is and who we are there."""

    servers: tuple[str, ...]
    project: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    credentials: Path | None = None
    ca: Path | None = None

    @property
    def inbox_prefix(self) -> str:
        """The subjects that only this principal may listen on."""
        prefix = f"_INBOX.{self.project}"
        return f"{prefix}.{self.user}" if self.user else prefix

    def required_servers(self) -> tuple[str, ...]:
        """The addresses.

        Raises:
            Unavailable: nobody said where DSec is.
        """
        if not self.servers:
            raise Unavailable(
                "no DSec is configured: nothing says where its NATS servers are",
                hint="run `dsec up`, set DSEC_CONTEXT or DSEC_SERVERS, or give servers (--server)",
            )
        return self.servers

    def tls(self) -> ssl.SSLContext | None:
        """For servers that speak TLS; None leaves the choice to the address."""
        if self.ca is None:
            return None
        try:
            return ssl.create_default_context(cafile=str(self.ca))
        except (OSError, ssl.SSLError) as err:
            raise InvalidArgument(f"the CA file {self.ca} cannot be used: {err}") from err


def resolve(
    arguments: Context,
    *,
    context: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> ClientSettings:
    """Put the levels together.

    Args:
        arguments: what the program says itself; wins.
        context: the context file; default: DSEC_CONTEXT, else the file of `dsec up`.

    Raises:
        InvalidArgument: a file or a variable is wrong, or a file named on purpose is missing.
    """
    environ = os.environ if environ is None else environ
    path = context or default_context_path(environ)
    named = context is not None or bool(environ.get("DSEC_CONTEXT"))
    file = read_context(path) if named or path.exists() else Context()
    levels = (level.expanded() for level in (arguments, _variables(environ), file))
    merged = Context()
    for level in levels:
        merged = merged.over(level)
    return ClientSettings(
        servers=merged.servers or (),
        project=check_project(merged.project or DEFAULT_PROJECT),
        user=merged.user,
        password=merged.password,
        credentials=merged.credentials,
        ca=merged.ca,
    )


def _variables(environ: Mapping[str, str]) -> Context:
    def path(name: str) -> Path | None:
        return Path(environ[name]).expanduser() if environ.get(name) else None

    servers = tuple(s.strip() for s in environ.get("DSEC_SERVERS", "").split(",") if s.strip())
    password = environ.get("DSEC_PASSWORD") or None
    if password is None and (file := path("DSEC_PASSWORD_FILE")) is not None:
        try:
            password = file.read_text().strip()
        except OSError as err:
            raise InvalidArgument(f"DSEC_PASSWORD_FILE cannot be read: {err}") from err
    return Context(
        servers=servers or None,
        project=environ.get("DSEC_PROJECT") or None,
        user=environ.get("DSEC_USER") or None,
        password=password,
        credentials=path("DSEC_CREDENTIALS"),
        ca=path("DSEC_CA"),
    )
