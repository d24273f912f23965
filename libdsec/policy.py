"""What a sandbox may reach and touch, as a caller writes it.

Constructors over the contracts in `libdsec.wire`: a mistake in the form is an InvalidArgument here,
at once; whether a rule or an alias can be enforced is decided by the node's policy service, which
refuses rather than leave anything out.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from .errors import InvalidArgument
from .wire.model import StrictInput
from .wire.sandbox import NetworkAllow, NetworkNone, NetworkPublic, NetworkSpec, PolicySpec


class UserInput(StrictInput):
    """A value that a person or program writes: what is wrong with it is an InvalidArgument."""

    def __init__(self, **data: object) -> None:
        try:
            super().__init__(**data)
        except ValidationError as err:
            raise InvalidArgument(f"{type(self).__name__}: {_first_mistake(err)}") from err


class Network:
    """What a sandbox may reach. Loopback is always there."""

    @staticmethod
    def none() -> NetworkNone:
        """Nothing."""
        return NetworkNone()

    @staticmethod
    def allow(*, services: Iterable[str] = (), rules: Iterable[str] = ()) -> NetworkAllow:
        """Only what is listed.

        Args:
            services: aliases from the operator's file, such as "pypi".
            rules: `protocol:address:port`, such as "tcp:10.0.0.5:443" or "udp:10.0.0.0/8:53".

        Raises:
            InvalidArgument: an entry is empty or not text.
        """
        return NetworkAllow(
            services=texts("services", services, "pypi"),
            rules=texts("rules", rules, "tcp:10.0.0.5:443"),
        )

    @staticmethod
    def public() -> NetworkPublic:
        """Everything but the operator's own networks."""
        return NetworkPublic()


class Policy(UserInput):
    """A rule set: the default reaches nothing and protects nothing.

    Attributes:
        protected_paths: absolute paths and globs that agent-controlled processes can neither read
            nor write, root included.
    """

    network: NetworkSpec = NetworkNone()
    protected_paths: tuple[str, ...] = ()

    def spec(self) -> PolicySpec:
        """As it travels.

        Raises:
            InvalidArgument: a protected path is not absolute.
        """
        for path in texts("protected_paths", self.protected_paths, "/tests/**"):
            if not path.startswith("/") or ".." in path.split("/"):
                raise InvalidArgument(
                    f"protected path {path!r} is not absolute", hint="write it like '/tests/**'"
                )
        return PolicySpec(network=self.network, protected_paths=self.protected_paths)


def texts(what: str, values: Iterable[str], example: str) -> tuple[str, ...]:
    """A list of non-empty strings; a lone string is the classic mistake and is refused."""
    if isinstance(values, str):
        raise InvalidArgument(f"{what} is a list, not a string", hint=f"{what}=[{example!r}]")
    listed = tuple(values)
    for value in listed:
        if not isinstance(value, str) or not value or value != value.strip() or "\0" in value:
            raise InvalidArgument(
                f"{what} has the entry {value!r}", hint=f"each is text like {example!r}"
            )
    return listed


def _first_mistake(err: ValidationError) -> str:
    mistake = err.errors(include_url=False)[0]
    where = ".".join(str(step) for step in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        return f"there is no field {where!r}"
    return f"{where}: {mistake['msg']}" if where else mistake["msg"]
