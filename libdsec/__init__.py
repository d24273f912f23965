"""libdsec: the client of DSec.

    from libdsec import DSecClient, Network, Policy

    async with DSecClient() as client, await client.create(image="python-3.11") as sandbox:
        print((await sandbox.exec(["python3", "--version"])).stdout)

`libdsec.sync` has the same names without `await`. Names are loaded on first use, so that importing
the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .args import DSecContainerRunArgs
    from .bounded import BoundedList
    from .client import DSecClient
    from .errors import (
        AlreadyExists,
        Conflict,
        DataLoss,
        DeadlineExceeded,
        DeathReason,
        DSecError,
        ExecTimeout,
        FileNotFound,
        Internal,
        InvalidArgument,
        IsADirectory,
        NoCapacity,
        NotADirectory,
        NotFound,
        PermissionDenied,
        QuotaExceeded,
        SandboxDead,
        Unavailable,
        Unsupported,
    )
    from .exec_result import ExecResult
    from .execution import Output
    from .layers import Upload
    from .policy import Network, Policy
    from .process import Exited, Process
    from .sandbox import Sandbox
    from .selection import Coverage, Many, SandboxListing
    from .transfer import Transferred
    from .wire.files import FileStat
    from .wire.layer import LayerInfo, LayerKind
    from .wire.placement import Progress
    from .wire.sandbox import Backend, Qos, SandboxInfo, SandboxMetrics, State

__all__ = [
    "AlreadyExists",
    "Backend",
    "BoundedList",
    "Conflict",
    "Coverage",
    "DSecClient",
    "DSecContainerRunArgs",
    "DSecError",
    "DataLoss",
    "DeadlineExceeded",
    "DeathReason",
    "ExecResult",
    "ExecTimeout",
    "Exited",
    "FileNotFound",
    "FileStat",
    "Internal",
    "InvalidArgument",
    "IsADirectory",
    "LayerInfo",
    "LayerKind",
    "Many",
    "Network",
    "NoCapacity",
    "NotADirectory",
    "NotFound",
    "Output",
    "PermissionDenied",
    "Policy",
    "Process",
    "Progress",
    "Qos",
    "QuotaExceeded",
    "Sandbox",
    "SandboxDead",
    "SandboxInfo",
    "SandboxListing",
    "SandboxMetrics",
    "State",
    "Transferred",
    "Unavailable",
    "Unsupported",
    "Upload",
]

_HOMES = {
    "args": ("DSecContainerRunArgs",),
    "bounded": ("BoundedList",),
    "client": ("DSecClient",),
    "errors": (
        "AlreadyExists", "Conflict", "DSecError", "DataLoss", "DeadlineExceeded", "DeathReason",
        "ExecTimeout", "FileNotFound", "Internal", "InvalidArgument", "IsADirectory", "NoCapacity",
        "NotADirectory", "NotFound", "PermissionDenied", "QuotaExceeded", "SandboxDead",
        "Unavailable", "Unsupported",
    ),
    "exec_result": ("ExecResult",),
    "execution": ("Output",),
    "layers": ("Upload",),
    "policy": ("Network", "Policy"),
    "process": ("Exited", "Process"),
    "sandbox": ("Sandbox",),
    "selection": ("Coverage", "Many", "SandboxListing"),
    "transfer": ("Transferred",),
    "wire.files": ("FileStat",),
    "wire.layer": ("LayerInfo", "LayerKind"),
    "wire.placement": ("Progress",),
    "wire.sandbox": ("Backend", "Qos", "SandboxInfo", "SandboxMetrics", "State"),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'libdsec' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
