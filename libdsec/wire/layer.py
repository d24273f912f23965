"""Layers: immutable, named name@version in a project's space, addressed by digest.

The catalogue is a KV bucket. Its keys, and what "newest" means, are defined here, because whoever
publishes a name and whoever resolves it must agree::

    <space>.<name>.<version>   the layer; created once, never changed
    <space>.<name>._newest     a copy of the highest version by `version_order`

Name and version may contain dots and capitals, so both are base32 (lower case, no padding) of their
bytes. One read resolves either form of a reference, however many layers there are.
"""

from __future__ import annotations

import base64
import re
from enum import StrEnum

from ..errors import NotFound
from .ids import parse_layer_ref
from .model import Message

PUBLIC_SPACE = "public"  # readable by every project
_NEWEST = "_newest"  # `_` is not in the base32 alphabet: no version encodes to this


class LayerKind(StrEnum):
    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"
    DIFF = "diff"


class ImageConfig(Message):
    """What an image says about the processes run in it."""

    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None


class LayerInfo(Message):
    space: str  # the project that owns it, or "public"
    name: str
    version: str
    digest: str  # blake2b-256 of the EROFS image, hex
    kind: LayerKind
    size_bytes: int
    files: int
    created_at: float
    config: ImageConfig = ImageConfig()
    parent: str | None = None  # digest, for diffs

    @property
    def ref(self) -> str:
        return f"{self.space}/{self.name}@{self.version}"


class ResolvedLayers(Message):
    """A spec's names as digests; the order is base, workspace, toolkits (later wins)."""

    base: LayerInfo
    workspace: LayerInfo | None = None
    toolkits: tuple[LayerInfo, ...] = ()

    @property
    def all(self) -> tuple[LayerInfo, ...]:
        middle = (self.workspace,) if self.workspace else ()
        return (self.base, *middle, *self.toolkits)

    @property
    def config(self) -> ImageConfig:
        """What the stack says together: of two layers that say something, the later wins."""
        env: dict[str, str] = {}
        user = workdir = None
        for layer in self.all:
            env |= layer.config.env
            user = layer.config.user or user
            workdir = layer.config.workdir or workdir
        return ImageConfig(env=env, user=user, workdir=workdir)


class PublishBegin(Message):
    """Opens an upload of a tar archive to an edge with the `publish` capability."""

    name: str
    version: str | None = None  # None: the next number
    kind: LayerKind
    config: ImageConfig = ImageConfig()
    size_bytes: int | None = None
    public: bool = False


class PublishStarted(Message):
    node: str
    upload_id: str
    chunk_bytes: int
    expires_s: float


class PublishChunk(Message):
    upload_id: str
    offset: int
    data: bytes


class PublishProgress(Message):
    received: int


class PublishCommit(Message):
    upload_id: str
    size_bytes: int
    sha256: str  # of the archive as the client sent it


class LayerQuery(Message):
    ref: str = ""  # a reference, or "" for all
    kind: LayerKind | None = None
    limit: int = 1000


class LayerListing(Message):
    layers: tuple[LayerInfo, ...] = ()
    dropped: int = 0


def layer_key(space: str, name: str, version: str) -> str:
    """Where the catalogue keeps one version of a layer."""
    return f"{space}.{_encode(name)}.{_encode(version)}"


def newest_key(space: str, name: str) -> str:
    """Where the catalogue keeps a copy of the newest version of a layer."""
    return f"{space}.{_encode(name)}.{_NEWEST}"


def key_pattern(space: str, name: str | None = None) -> str:
    """The keys of a space, or of one name in it, with the bucket's wildcards."""
    return f"{space}.>" if name is None else f"{space}.{_encode(name)}.*"


def is_newest_key(key: str) -> bool:
    return key.endswith(f".{_NEWEST}")


def candidate_keys(ref: str, project: str) -> tuple[str, ...]:
    """The keys that may hold what `ref` means to `project`, to be tried in order.

    A reference without a space is the project's own layer, or else the public one.

    Raises:
        InvalidArgument: not a layer reference.
        NotFound: a space that is neither the project's own nor public.
    """
    space, name, version = parse_layer_ref(ref)
    if space not in (None, project, PUBLIC_SPACE):
        raise NotFound(
            f"no layer {ref!r} for project {project!r}",
            hint=f"a project reads its own layers and those of {PUBLIC_SPACE!r}",
        )
    spaces = dict.fromkeys((project, PUBLIC_SPACE) if space is None else (space,))
    if version is None:
        return tuple(newest_key(s, name) for s in spaces)
    return tuple(layer_key(s, name, version) for s in spaces)


def version_order(version: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key: numbers count as numbers, and letters after a number come before it.

    `9 < 10`, `1.9 < 1.10`, `1.0rc1 < 1.0 < 1.0.1`. Versions that differ only in their separators
    are told apart by their spelling, so the order is total.
    """
    parts: list[tuple[int, int, str]] = [
        (2, int(part), "") if part.isdigit() else (0, 0, part)
        for part in re.findall(r"[0-9]+|[A-Za-z]+", version)
    ]
    return (*parts, (1, 0, ""), (0, 0, version))


def _encode(token: str) -> str:
    return base64.b32encode(token.encode()).decode().rstrip("=").lower()
