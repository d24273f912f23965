"""The demo's own stack: brought up and taken down by the command everybody uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HOME = Path("/var/lib/dsec-demo")
NODES = 2
DSEC = str(Path(sys.executable).parent / "dsec")


def base_image() -> Path:
    """The Debian base as an archive, made once and cached."""
    done = subprocess.run(
        [sys.executable, "-m", "services.images", "debian", "--cache", str(HOME / "images")],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return Path(done.stdout.strip())


def up() -> None:
    """`dsec up`; its progress goes to our standard error."""
    subprocess.run(
        [DSEC, "up", "--home", str(HOME), "--nodes", str(NODES)], check=True, stdout=sys.stderr
    )


def down() -> bool:
    """Whether nothing is left; what is, the command has said."""
    done = subprocess.run([DSEC, "down", "--home", str(HOME)], check=False, stdout=sys.stderr)
    return done.returncode == 0


def set_alias(name: str, rule: str, env: dict[str, str]) -> None:
    """Write the alias file as an operator would; the policy services notice by themselves."""
    lines = [f"[services.{name}]", f'rules = ["{rule}"]', "", f"[services.{name}.env]"]
    lines += [f'{key} = "{value}"' for key, value in env.items()]
    path = HOME / "aliases.toml"
    temporary = path.with_suffix(".new")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(path)
