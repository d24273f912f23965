"""What people and programs see: tables and words, or one JSON document or line per thing.

Results go to standard output, everything else (progress, warnings, errors) to standard error.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from ..errors import DSecError
from ..placing import in_words
from ..selection import Coverage
from ..wire.error import ErrorReply
from ..wire.placement import Progress

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

_LINE_EVERY_S = 2.0  # progress in a file or a pipe, where each piece of it stays
_WIDE = 10_000  # columns of what goes into a file or a pipe: nothing is wrapped or cut


def document(value: object) -> None:
    """One JSON value on a line of its own."""
    print(json.dumps(_plain(value), ensure_ascii=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for people; without rows only its head."""
    drawn = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        drawn.add_row(*("" if cell is None else str(cell) for cell in row))
    stdout().print(drawn)


def stdout() -> Console:
    """Made when used, so that a redirected stream is seen as such."""
    wide = None if sys.stdout.isatty() else _WIDE
    return Console(file=sys.stdout, width=wide, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """A word beside the result."""
    print(text, file=sys.stderr)


def complain(err: DSecError, *, as_json: bool) -> None:
    """An error, with its way out and the ids to hand on."""
    if as_json:
        say(json.dumps({"error": _plain(ErrorReply.of(err))}, ensure_ascii=False))
        return
    say(f"dsec: {err.message}")
    if err.hint:
        say(f"  hint: {err.hint}")
    if err.request_id:
        say(f"  request: {err.request_id}  (dsec trace {err.request_id})")


def coverage(found: Coverage, *, dropped: str = "are not listed") -> None:
    """Whom an answer does not come from, if there is anybody; and how many it leaves out."""
    for node in sorted(found.missing):
        say(f"dsec: node {node} did not answer")
    for node, err in sorted(found.failed.items()):
        say(f"dsec: node {node}: {err.message}")
    if not found.nodes_known:
        say("dsec: no scheduler answers: there may be nodes that are not listed")
    if found.dropped:
        say(f"dsec: {found.dropped} more {dropped}")


@contextmanager
def waiting(what: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show on standard error what is being waited for; gives a function that tells the news."""
    if quiet:
        yield lambda news: None
        return
    console = Console(stderr=True, highlight=False, markup=False)
    if console.is_terminal:
        with console.status(what) as status:
            yield lambda news: status.update(f"{what}: {news}")
        return
    last, next_at = "", 0.0

    def line(news: str) -> None:
        nonlocal last, next_at
        if news != last and time.monotonic() >= next_at:
            last, next_at = news, time.monotonic() + _LINE_EVERY_S
            say(f"{what}: {news}")

    yield line


def progress_teller(tell: Callable[[str], None]) -> Callable[[Progress], None]:
    return lambda progress: tell(in_words(progress))


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def age(seconds: float) -> str:
    """A time span for people."""
    seconds = max(0, int(seconds))
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 2 * 3600:
        return f"{seconds // 60}m"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m" if seconds < 172_800 else _days(seconds)


def _days(seconds: int) -> str:
    return f"{seconds // 86_400}d{seconds % 86_400 // 3600:02d}h"


def _plain(value: object) -> object:
    """As JSON has it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value
