"""What a caller's command means in its sandbox: who runs what, where, with which environment. Pure.

Later wins: the image's environment, what the policy's aliases add, the sandbox's own, its secrets,
the command's own. A user or directory that nobody names is root and /.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from libdsec.errors import InvalidArgument, Unsupported
from libdsec.wire import defaults as d
from libdsec.wire.execution import ExecRequest

from .agent.model import ExecSpec
from .agent.protocol import MAX_EXEC_ID
from .record import Origin, Status

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def exec_spec(origin: Origin, status: Status, request: ExecRequest) -> ExecSpec:
    """Raises InvalidArgument or Unsupported for what can never run."""
    check_exec_id(request.exec_id)
    argv = _argv(request)
    if request.tty:
        raise Unsupported("a command with a terminal is not built yet", hint="leave tty=False")
    if not 0 <= request.max_output_bytes <= d.MAX_OUTPUT_LIMIT:
        raise InvalidArgument(
            f"max_output_bytes is {request.max_output_bytes}",
            hint=f"it is at most {d.MAX_OUTPUT_LIMIT}",
        )
    if request.timeout_s is not None and request.timeout_s <= 0:
        raise InvalidArgument(f"timeout_s is {request.timeout_s}", hint="it is more than 0")
    env = environment(origin, status, request.env)
    cwd = request.cwd or origin.spec.workdir or origin.image.workdir or "/"
    user = who(origin, request.user)
    _check_text(("cwd", cwd), ("user", user), *env.items(), *(("argv", word) for word in argv))
    return ExecSpec(
        exec_id=request.exec_id,
        argv=argv,
        env=env,
        cwd=cwd,
        user=user,
        stdin_pipe=bool(request.stdin) or request.stdin_open,
        timeout_s=request.timeout_s,
        capture_bytes=request.max_output_bytes,
        digest=_digest(request),
    )


def environment(origin: Origin, status: Status, own: Mapping[str, str]) -> dict[str, str]:
    spec = origin.spec
    return {
        "PATH": _PATH,
        **origin.image.env,
        **status.policy_env,
        **spec.env,
        **spec.secrets,
        **own,
    }


def who(origin: Origin, asked: str | None) -> str:
    """The user to act as, in the agent's own words ("" is root)."""
    return asked or origin.spec.user or origin.image.user or ""


def check_exec_id(exec_id: str) -> None:
    if not 1 <= len(exec_id.encode()) <= MAX_EXEC_ID or not exec_id.isprintable():
        raise InvalidArgument(
            "exec_id is not valid", hint=f"it is 1 to {MAX_EXEC_ID} bytes of printable text"
        )


def _argv(request: ExecRequest) -> tuple[str, ...]:
    if bool(request.argv) == (request.shell is not None):
        raise InvalidArgument("a command is either argv or shell", hint="give exactly one of them")
    return request.argv or ("/bin/sh", "-c", request.shell or "")


def _check_text(*texts: tuple[str, str]) -> None:
    for name, text in texts:
        if "\0" in name or "\0" in text:
            raise InvalidArgument(f"{name.split(chr(0))[0]!r} holds a NUL", hint="no text may")
        if name == "" or ("=" in name):
            raise InvalidArgument(f"{name!r} cannot be the name of an environment variable")


def _digest(request: ExecRequest) -> int:
    """Of what makes it this command and no other. How long a caller waits and how much it reads are
    not in it: a retry may differ in those. Nor is what the sandbox adds: that may have changed."""
    what = [request.argv, request.shell, request.cwd, request.user, request.stdin_open]
    text = json.dumps([what, sorted(request.env.items())]).encode()
    hashed = hashlib.blake2b(text, digest_size=8)
    hashed.update(request.stdin)
    return int.from_bytes(hashed.digest()) or 1
