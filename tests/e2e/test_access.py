"""Who may use somebody else's stack, from where, and with what."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from tests.stack import IMAGE, Stack

_UID = 64_321  # nobody's

# A first run before root is given up imports everything: where the interpreter lives may be closed
# to others, which says nothing about DSec.
_AS_USER = f"""
import asyncio, os, sys
import libdsec
uid, context, home = int(sys.argv[1]), sys.argv[2], sys.argv[3]

async def main():
    async with libdsec.DSecClient(context=context) as client:
        async with await client.create(image="{IMAGE}", cpus=0.2, memory_mib=64) as sandbox:
            result = await sandbox.exec(["id", "-u"])
            print(os.getuid(), client.project, sandbox.id, result.stdout.strip())

asyncio.run(main())
os.chdir("/")
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
assert not os.access(home, os.R_OK), "the stack's home holds passwords"
asyncio.run(main())
"""


async def run_as_user(stack: Stack, context: Path) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", _AS_USER, str(_UID), str(context), str(stack.home)],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip


def handed_over(context: Path, to: Path, mode: int = 0o600) -> Path:
    """As an operator gives a context file to a user: theirs, for their eyes only."""
    to.write_bytes(context.read_bytes())
    to.chmod(mode)
    os.chown(to, _UID, _UID)
    for folder in to.parents:  # pytest's own directories are closed to others
        if folder.stat().st_uid == 0 and folder.is_relative_to("/tmp/pytest-of-root"):
            folder.chmod(0o755)
    return to


async def test_user_without_root_runs_a_sandbox(stack: Stack, tmp_path: Path) -> None:
    context = handed_over(stack.add_user("alice", "team-a"), tmp_path / "alice.toml")
    done = await run_as_user(stack, context)
    assert done.returncode == 0, done.stderr
    uid, project, sandbox_id, inside = done.stdout.splitlines()[-1].split()
    assert (uid, project, inside) == (str(_UID), "team-a", "0")  # root only inside
    assert sandbox_id.split("_")[0] in stack.node_names


async def test_stack_of_others_cannot_be_used_without_credentials(
    stack: Stack, tmp_path: Path
) -> None:
    context = handed_over(stack.context, tmp_path / "mallory.toml")
    lines = context.read_text().splitlines()
    context.write_text("\n".join(line for line in lines if not line.startswith("password")))
    done = await run_as_user(stack, context)
    assert done.returncode != 0
    assert "PermissionDenied" in done.stderr


def test_up_without_root_says_what_to_do_instead(stack: Stack, tmp_path: Path) -> None:
    up = f"""
import os, sys
from services.stack.__main__ import app
os.setgroups([]); os.setresgid({_UID}, {_UID}, {_UID}); os.setresuid({_UID}, {_UID}, {_UID})
app(["up", "--home", {str(tmp_path / "none")!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", up], capture_output=True, text=True, timeout=60,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 3
    assert "needs root" in done.stderr
    assert "DSEC_CONTEXT" in done.stderr
