"""Eight recorded tool-call sequences that stand in for a model's turns.

They differ as a group of attempts at one task does: in what is looked at, how the fix is made, how
long the model thinks, and in one that reaches for what its policy forbids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

REPO = "/repo"
HARNESS = "/opt/harness/harness.py"
FILE = f"{REPO}/toolz/itertoolz.py"
BROKEN = "yield prev[:len(seq) // n]"
FIXED = "yield prev[:len(seq) % n]"


@dataclass(frozen=True)
class Step:
    """One tool call. `idle_s` is the thinking before it; `pause`: the trainer pauses us there."""

    kind: str  # exec | test | write | fetch
    argv: tuple[str, ...] = ()
    stdin: str = ""
    idle_s: float = 0.2
    pause: bool = False


def tool(name: str, argument: str, stdin: str = "", **more: object) -> Step:
    kind = {"test": "test", "fetch": "fetch"}.get(name, "exec")
    return Step(kind, ("python3", HARNESS, name, argument), stdin, **more)  # type: ignore[arg-type]


def shell(command: str, **more: object) -> Step:
    return Step("exec", ("/bin/sh", "-c", command), **more)  # type: ignore[arg-type]


_EDIT = json.dumps({"old": BROKEN, "new": FIXED})
_LOOKS = (
    tool("look", REPO),
    shell(f"cd {REPO} && ls toolz/tests | head -20"),
    shell(f"grep -n 'def partition_all' -A 30 {FILE}"),
    tool("look", f"{REPO}/toolz"),
)
_FIXES = (
    tool("edit", FILE, _EDIT),
    shell(f"sed -i 's|len(seq) // n\\]|len(seq) % n]|' {FILE}"),
    Step("write"),  # read the file, mend it, write it back, all through the files API
    shell(
        f"python3 - <<'EOF'\nimport pathlib\np = pathlib.Path('{FILE}')\n"
        f"p.write_text(p.read_text().replace('{BROKEN}', '{FIXED}'))\nEOF"
    ),
)


def recording(index: int, *, forbidden_url: str, mirror_url: str) -> tuple[Step, ...]:
    """The calls of rollout `index`; odd ones are paused and resumed while the model is idle."""
    look = (_LOOKS[index % 4], _LOOKS[(index + 1) % 4])
    asks = {3: (tool("fetch", forbidden_url),), 5: (tool("fetch", mirror_url),)}.get(index, ())
    pause = index % 2 == 1
    return (
        *look,
        tool("test", REPO, idle_s=0.1 * (index % 3)),
        *asks,
        Step("exec", ("sleep", "0"), idle_s=1.0, pause=pause),
        _FIXES[index % 4],
        tool("test", REPO),
    )
