"""Layers: immutable, named name@version in a project's space, addressed by digest."""

from __future__ import annotations

from enum import StrEnum

from .model import Message


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


class LatestVersion(Message):
    """Newest published version of a name."""

    version: str
    sequence: int


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
