"""Trees for layer tests: described as values, written as archives, read back from mounts.

The description is the model that both the archive and the mounted image are held against; nothing
of the code under test is used to make or read one.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Node:
    """One name. `kind` is a letter of `ls -l`; hard links are `link_to` the first name."""

    kind: str
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    data: bytes = b""
    target: str = ""
    xattrs: tuple[tuple[str, bytes], ...] = ()
    links: frozenset[str] = field(default_factory=frozenset)  # all names of this inode, if several


Tree = dict[str, Node]

_TYPES = {
    "-": tarfile.REGTYPE,
    "d": tarfile.DIRTYPE,
    "l": tarfile.SYMTYPE,
    "p": tarfile.FIFOTYPE,
    "c": tarfile.CHRTYPE,
}
_SKIPPED_XATTRS = frozenset({"security.selinux"})


def write_archive(tree: Tree, path: Path, *, order: list[str] | None = None) -> Path:
    """In `order`, or sorted; of hard links the first in that order carries the data."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        written: set[str] = set()
        for name in order or sorted(tree):
            node = tree[name]
            first = next((other for other in node.links if other in written), None)
            info = tarfile.TarInfo(name)
            info.type = tarfile.LNKTYPE if first else _TYPES[node.kind]
            info.linkname = first or node.target
            info.mode, info.uid, info.gid = node.mode, node.uid, node.gid
            info.size = 0 if first else len(node.data)
            seconds, nanoseconds = divmod(node.mtime_ns, 10**9)
            info.pax_headers = {"mtime": f"{seconds}.{nanoseconds:09d}"}
            for key, value in node.xattrs:
                info.pax_headers[f"SCHILY.xattr.{key}"] = value.decode("utf-8", "surrogateescape")
            tar.addfile(info, io.BytesIO(node.data))
            written.add(name)
    return path


def read_tree(root: Path) -> Tree:
    """Everything below `root`, and the root itself as `.`."""
    tree: Tree = {".": _node(root, follow=True)}
    inodes: dict[int, set[str]] = defaultdict(set)
    for directory, names, files in os.walk(root):
        for entry in (*names, *files):
            path = Path(directory) / entry
            name = str(path.relative_to(root))
            tree[name] = _node(path)
            if tree[name].kind != "d":
                inodes[path.lstat().st_ino].add(name)
    for together in inodes.values():
        for name in together if len(together) > 1 else ():
            tree[name] = replace(tree[name], links=frozenset(together))
    return tree


def _node(path: Path, *, follow: bool = False) -> Node:
    status = path.stat(follow_symlinks=follow)
    kind = stat.filemode(status.st_mode)[0]
    xattrs = [
        (key, os.getxattr(path, key, follow_symlinks=follow))
        for key in os.listxattr(path, follow_symlinks=follow)
        if key not in _SKIPPED_XATTRS
    ]
    return Node(
        kind=kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        data=path.read_bytes() if kind == "-" else b"",
        target=os.readlink(path) if kind == "l" else "",
        xattrs=tuple(sorted(xattrs)),
    )
