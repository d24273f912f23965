"""From the arguments of `create` to the spec that travels; every mistake named before it is sent.

Pure. What only a node can know (does the layer exist, can the rule be enforced) is not judged here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Required, TypedDict, TypeVar

from .errors import InvalidArgument
from .policy import Policy, texts
from .wire import defaults as d
from .wire.ids import LABEL, parse_layer_ref
from .wire.layer import LayerInfo
from .wire.sandbox import Backend, Lifetime, PolicySpec, Qos, Resources, SandboxSpec

Choice = TypeVar("Choice", bound=StrEnum)

LayerRef = str | LayerInfo

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_KEY = 240  # the wire takes 256; a large job's messages have a number added
# NATS takes 1 MiB; what is added on the way (resolved layers, headers) needs room as well.
_MAX_SPEC_BYTES = 512 << 10


class SpecArguments(TypedDict, total=False):
    """What `create` and `create_many` take, `image` included; each with its default."""

    backend: str
    image: Required[LayerRef]
    workspace: LayerRef | None
    toolkits: Iterable[LayerRef]
    cpus: float
    memory_mib: int
    disk_mib: int
    max_files: int
    shm_mib: int
    pids: int
    qos: str
    policy: Policy | None
    phases: Mapping[str, Policy] | None
    user: str | None
    env: Mapping[str, str]
    secrets: Mapping[str, str]
    workdir: str | None
    labels: Mapping[str, str]
    idle_timeout_s: float
    max_lifetime_s: float
    max_paused_s: float


def build_spec(arguments: SpecArguments) -> SandboxSpec:
    """The spec.

    Raises:
        InvalidArgument: naming the argument, what is wrong with it and what would be right.
    """
    if unknown := set(arguments) - set(SpecArguments.__annotations__):
        raise InvalidArgument(
            f"create has no argument {', '.join(sorted(unknown))}",
            hint=f"it takes {', '.join(sorted(SpecArguments.__annotations__))}",
        )
    policy, phases, phase = _policies(arguments.get("policy"), arguments.get("phases"))
    env = _environment("env", arguments.get("env", {}))
    secrets = _environment("secrets", arguments.get("secrets", {}))
    if both := sorted(set(env) & set(secrets)):
        raise InvalidArgument(f"{', '.join(both)}: both in env and in secrets")
    workspace = arguments.get("workspace")
    spec = SandboxSpec(
        backend=_choice("backend", Backend, arguments.get("backend", Backend.CONTAINER)),
        image=_layer("image", arguments.get("image", "")),
        workspace=None if workspace is None else _layer("workspace", workspace),
        toolkits=_toolkits(arguments.get("toolkits", ())),
        resources=_resources(arguments),
        qos=_choice("qos", Qos, arguments.get("qos", Qos.BEST_EFFORT)),
        policy=policy,
        phases=phases,
        phase=phase,
        user=_optional_text("user", arguments.get("user")),
        workdir=_workdir(arguments.get("workdir")),
        env=env,
        secrets=secrets,
        labels=check_labels(arguments.get("labels", {})),
        lifetime=_lifetime(arguments),
    )
    if (size := len(spec.encode())) > _MAX_SPEC_BYTES:
        raise InvalidArgument(
            f"the arguments are {size} bytes, more than {_MAX_SPEC_BYTES}",
            hint="write large values into files after the create, or put them into a layer",
        )
    return spec


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels to set or to select by."""
    if len(labels) > d.MAX_LABELS:
        raise InvalidArgument(f"{len(labels)} labels are more than {d.MAX_LABELS}")
    for name, value in labels.items():
        for what, text in (("label", name), (f"label {name!r}: value", value)):
            if not isinstance(text, str) or LABEL.fullmatch(text) is None:
                raise InvalidArgument(
                    f"{what} {text!r} is not valid",
                    hint="1 to 63 letters, digits and . _ / -, the first a letter or digit",
                )
    return dict(labels)


def check_key(key: str) -> str:
    """An idempotency key as the caller gave it."""
    if not isinstance(key, str) or not 0 < len(key) <= _MAX_KEY:
        raise InvalidArgument(
            f"idempotency_key {str(key)[:80]!r} is not valid", hint=f"1 to {_MAX_KEY} characters"
        )
    return key


def check_seconds(what: str, value: float) -> float:
    """A time that ends and is not over yet."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise InvalidArgument(f"{what} is {value!r}", hint="it is a number of seconds above 0")
    return float(value)


def check_environment(env: Mapping[str, str]) -> dict[str, str]:
    return _environment("env", env)


def _policies(
    policy: Policy | None, phases: Mapping[str, Policy] | None
) -> tuple[PolicySpec, dict[str, PolicySpec], str | None]:
    for what, given in (("policy", policy), *((f"phase {n!r}", p) for n, p in _items(phases))):
        if given is not None and not isinstance(given, Policy):
            raise InvalidArgument(f"{what} is a {type(given).__name__}, not a Policy")
    if phases is None:
        return (policy or Policy()).spec(), {}, None
    if policy is not None:
        raise InvalidArgument(
            "both policy and phases are given", hint="the first phase applies at create"
        )
    if not phases:
        raise InvalidArgument("phases is empty", hint="name at least one, or leave it out")
    check_labels(dict.fromkeys(phases, "phase"))
    specs = {name: phase.spec() for name, phase in phases.items()}
    first = next(iter(specs))
    return specs[first], specs, first


def _items(phases: Mapping[str, Policy] | None) -> Iterable[tuple[str, Policy]]:
    return phases.items() if phases else ()


def _resources(arguments: SpecArguments) -> Resources:
    resources = Resources(
        cpus=_ranged("cpus", arguments.get("cpus", d.CPUS), d.CPUS_RANGE),
        memory_mib=_whole("memory_mib", arguments.get("memory_mib", d.MEMORY_MIB),
                          d.MEMORY_MIB_RANGE),
        disk_mib=_whole("disk_mib", arguments.get("disk_mib", d.DISK_MIB), d.DISK_MIB_RANGE),
        max_files=_whole("max_files", arguments.get("max_files", d.MAX_FILES), d.MAX_FILES_RANGE),
        shm_mib=_whole("shm_mib", arguments.get("shm_mib", d.SHM_MIB), d.SHM_MIB_RANGE),
        pids=_whole("pids", arguments.get("pids", d.PIDS), d.PIDS_RANGE),
    )  # fmt: skip
    if "shm_mib" in arguments and resources.shm_mib > resources.memory_mib:
        raise InvalidArgument(
            f"shm_mib={resources.shm_mib} is more than memory_mib={resources.memory_mib}",
            hint="shared memory counts as the sandbox's memory",
        )
    return resources


def _lifetime(arguments: SpecArguments) -> Lifetime:
    return Lifetime(
        idle_timeout_s=check_seconds(
            "idle_timeout_s", arguments.get("idle_timeout_s", d.IDLE_TIMEOUT_S)
        ),
        max_lifetime_s=check_seconds(
            "max_lifetime_s", arguments.get("max_lifetime_s", d.MAX_LIFETIME_S)
        ),
        max_paused_s=check_seconds("max_paused_s", arguments.get("max_paused_s", d.MAX_PAUSED_S)),
    )


def _choice(what: str, kind: type[Choice], value: str) -> Choice:
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgument(
            f"unknown {what} {value!r}", hint=f"it is one of {', '.join(kind)}"
        ) from None


def _ranged(what: str, value: float, allowed: tuple[float, float]) -> float:
    low, high = allowed
    if not _is_number(value) or not low <= value <= high:
        raise InvalidArgument(
            f"{what}={value!r} is impossible", hint=f"from {low:,.10g} to {high:,.10g}"
        )
    return float(value)


def _whole(what: str, value: int, allowed: tuple[int, int]) -> int:
    if not isinstance(value, int):
        raise InvalidArgument(f"{what}={value!r} is not a whole number")
    _ranged(what, value, allowed)
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _layer(what: str, ref: LayerRef) -> str:
    if isinstance(ref, LayerInfo):
        return ref.ref
    if not isinstance(ref, str) or not ref:
        wrong = f"{ref!r}, not a layer" if ref else "empty"
        raise InvalidArgument(f"{what} is {wrong}", hint="name a layer: name or name@version")
    parse_layer_ref(ref)
    return ref


def _toolkits(refs: Iterable[LayerRef]) -> tuple[str, ...]:
    if isinstance(refs, str | LayerInfo):
        raise InvalidArgument("toolkits is a list", hint=f"toolkits=[{str(refs)!r}]")
    listed = tuple(_layer("toolkits", ref) for ref in refs)
    if len(listed) > d.MAX_TOOLKITS:
        raise InvalidArgument(f"{len(listed)} toolkits are more than {d.MAX_TOOLKITS}")
    return listed


def _environment(what: str, env: Mapping[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not isinstance(name, str) or _ENV_NAME.fullmatch(name) is None:
            raise InvalidArgument(f"{what}: {name!r} is not a variable's name")
        if not isinstance(value, str) or "\0" in value:
            # The value itself stays out of the message: it may be a secret.
            raise InvalidArgument(f"{what}: {name} is not text without NUL")
    return dict(env)


def _optional_text(what: str, value: str | None) -> str | None:
    if value is None:
        return None
    return texts(what, (str(value),), "root")[0]


def _workdir(path: str | None) -> str | None:
    if path is not None and (not path.startswith("/") or "\0" in path):
        raise InvalidArgument(f"workdir {path!r} is not absolute", hint="it begins with /")
    return path
