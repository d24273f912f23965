"""Layers mounted on this node: each image once, shared by every sandbox that stacks it.

Two mounts of one image share no page cache, so a layer is mounted once, at
``<run>/layers/<digest>`` in the node's pinned namespace, where a successor edge finds it.
Counting references is the caller's: this module unmounts when told to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from libhost.paths import NodePaths


@dataclass(frozen=True)
class MountedLayer:
    """One layer in the pinned namespace. mount_layer -> (any number of overlays) -> umount_layer.

    ``fd`` is an O_PATH descriptor of the mount's root, owned by this value's holder.
    """

    digest: str
    path: Path
    fd: int


def mount_layer(paths: NodePaths, digest: str, image: Path) -> MountedLayer:
    """Mount ``image`` as the layer ``digest``; if it is mounted already, open that mount."""
    raise NotImplementedError


def mounted_layers(paths: NodePaths) -> dict[str, MountedLayer]:
    """Every layer found mounted in this namespace: what a successor starts from."""
    raise NotImplementedError


def umount_layer(paths: NodePaths, layer: MountedLayer) -> None:
    """Close and unmount. Sandboxes that still stack it keep it until they end."""
    raise NotImplementedError
