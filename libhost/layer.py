"""Layers mounted on this node: each image once, shared by every sandbox that stacks it.

Two mounts of one image share no page cache, so a layer is mounted once, at
``<run>/live/layers/<digest>`` in the node's pinned namespace, where a successor edge finds it. The
overlay makes a private clone of it for each sandbox, which does share.
Counting references is the caller's: this module unmounts when told to.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from libhost import erofs, syscall
from libhost.paths import NodePaths

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class MountedLayer:
    """One layer in the pinned namespace. mount_layer -> (any number of overlays) -> umount_layer.

    ``fd`` is a detached clone of it, owned by this value's holder: stacked by descriptor, the
    layer's path on the host does not show in the sandbox's mount table.
    """

    digest: str
    path: Path
    fd: int


def mount_layer(paths: NodePaths, digest: str, image: Path) -> MountedLayer:
    """Mount ``image`` as the layer ``digest``; if it is mounted already, open that mount.

    Not for two threads with one digest at a time: the caller's reference count is its lock.
    """
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"layer digest {digest!r} is not 64 hex digits")
    path = paths.layer_mount(digest)
    if path.is_mount():
        return _open(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = erofs.mount_image(image)
    try:
        syscall.move_mount(fd, str(path))
    finally:
        os.close(fd)
    return _open(path)


def mounted_layers(paths: NodePaths) -> dict[str, MountedLayer]:
    """Every layer found mounted in this namespace: what a successor starts from."""
    if not paths.layers_dir.is_dir():
        return {}
    found = (path for path in paths.layers_dir.iterdir() if path.is_mount())
    return {path.name: _open(path) for path in found}


def umount_layer(paths: NodePaths, layer: MountedLayer) -> None:
    """Close and unmount. Sandboxes that still stack it keep it until they end."""
    os.close(layer.fd)
    syscall.umount2(str(layer.path), syscall.MNT_DETACH)
    with contextlib.suppress(FileNotFoundError):
        paths.layer_mount(layer.digest).rmdir()


def _open(path: Path) -> MountedLayer:
    fd = syscall.open_tree(syscall.AT_FDCWD, str(path), syscall.OPEN_TREE_CLONE)
    return MountedLayer(path.name, path, fd)
