"""The operator's alias file: read, checked, and read again when it changed.

    never = ["10.1.0.0/16"]                  # no caller's rule and no public network reaches these

    [services.pypi]                          # Network.allow(services=["pypi"])
    rules = ["tcp:169.254.77.1:8081"]
    env = { PIP_INDEX_URL = "http://169.254.77.1:8081/simple" }
    hosts = { "mirror.internal" = "169.254.77.1" }

    [public]                                 # what Network.public() has besides the internet
    rules = ["udp:10.0.0.2:53"]

A file that becomes unreadable changes nothing: the last good table stays, and health says so. One
that could never be read is no table at all, and whatever needs an alias is refused. Rules that are
in force for a sandbox never change because the file did.
"""

from __future__ import annotations

import os
import re
import tomllib
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field, ValidationError

from libdsec.errors import DSecError
from libdsec.wire.model import StrictInput

from .compile import Alias, AliasTable
from .rules import parse_network, parse_rule

MAX_FILE_BYTES: Final = 1 << 20


def _matching(pattern: str, what: str) -> AfterValidator:
    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"{value!r} is not {what}")
        return value

    return AfterValidator(check)


def _address(value: str) -> str:
    return str(ip_address(value))


_Variable = Annotated[str, _matching(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name")]
_Value = Annotated[str, _matching(r"[^\x00]*", "a variable's value")]
_Host = Annotated[str, _matching(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252})", "a host's name")]
_Service = Annotated[str, _matching(r"[a-z0-9][a-z0-9_.-]{0,62}", "a service's name")]


class _AliasEntry(StrictInput):
    rules: tuple[str, ...] = ()
    env: dict[_Variable, _Value] = Field(default_factory=dict)
    hosts: dict[_Host, Annotated[str, AfterValidator(_address)]] = Field(default_factory=dict)

    def alias(self) -> Alias:
        rules = tuple(rule for text in self.rules for rule in parse_rule(text))
        return Alias(rules, self.env, self.hosts)


class _File(StrictInput):
    never: tuple[str, ...] = ()
    public: _AliasEntry = _AliasEntry()
    services: dict[_Service, _AliasEntry] = Field(default_factory=dict)


def parse_aliases(text: str, path: str) -> AliasTable:
    """The table in a file's text. Raises ValueError saying where it is wrong."""
    try:
        file = _File.model_validate(tomllib.loads(text))
        return AliasTable(
            path=path,
            services={name: entry.alias() for name, entry in file.services.items()},
            public=file.public.alias(),
            never=tuple(parse_network(text) for text in file.never),
        )
    except ValidationError as err:
        first = err.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}") from err
    except DSecError as err:
        raise ValueError(str(err)) from err


class AliasFile:
    """The current table of a file. `problem` says why the file as it is now is not in use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._seen: tuple[int, ...] | None = None
        self._table = AliasTable(str(path), missing="it has not been read yet")

    def current(self) -> AliasTable:
        """Looks whether the file changed, which is one system call, and reads it then."""
        try:
            status = self.path.stat()
        except OSError as err:
            self._seen = None
            self._fail(f"it cannot be read: {os.strerror(err.errno or 0)}")
            return self._table
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen != self._seen:
            self._seen = seen
            self._read()
        return self._table

    def _read(self) -> None:
        try:
            with self.path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                raise ValueError(f"it is over {MAX_FILE_BYTES} bytes")
            self._table = parse_aliases(raw.decode(), str(self.path))
            self.problem = ""
        except OSError as err:
            self._fail(f"it cannot be read: {os.strerror(err.errno or 0)}")
        except ValueError as err:  # not UTF-8, not TOML, not a table of aliases
            self._fail(f"it is not valid: {err}")

    def _fail(self, problem: str) -> None:
        self.problem = problem
        if self._table.missing:
            self._table = AliasTable(str(self.path), missing=problem)
