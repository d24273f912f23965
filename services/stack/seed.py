"""What a fresh stack has in place: a busybox base anybody may start from, and a default context."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from libdsec import DSecClient
from libdsec.errors import NotFound
from libdsec.settings import default_context_path

from ..images import RECIPES, cached
from .configure import configure, operator_of
from .description import StackDescription
from .layout import StackPaths

BUSYBOX = "public/busybox"
VERSION = "1"


async def publish_busybox(
    paths: StackPaths, description: StackDescription, *, say: Callable[[str], None]
) -> None:
    """Publish the busybox base in the public space, unless it is there."""
    operator = operator_of(configure(paths, description))
    if operator is None:
        say("no operator in users.toml: the busybox base is not published")
        return
    context = paths.home / f"{operator.name}.toml"
    async with DSecClient(context=context, project="public") as client:
        try:
            await client.layers.info(f"{BUSYBOX}@{VERSION}")
            return
        except NotFound:
            say(f"publishing the base {BUSYBOX}@{VERSION}")
        archive = cached(RECIPES["busybox"], paths.home / "images")
        await client.layers.publish(archive, f"busybox@{VERSION}", "base")


def write_default_context(paths: StackPaths) -> Path:
    """Make a bare DSecClient() of this user speak to this stack."""
    target = default_context_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(paths.context, temporary)
    temporary.chmod(0o600)
    temporary.replace(target)
    return target
